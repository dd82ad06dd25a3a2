"""Routes a policy's requests over its engines."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from agentrl.protocols import Engine
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.generation import Generation, GenerationRequest

_log = logging.getLogger(__name__)


class EngineRouter:
    """Sends each session to one engine, the least loaded when the session begins.

    An engine that is set aside gets no request until it is put back; its sessions go on elsewhere from
    their tokens. A request that an engine dropped without an answer is sent again, once to each other
    engine: nothing of it was committed. Such requests are counted in `regenerated`.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = {engine.name: engine for engine in engines}
        self.regenerated = 0
        self._aside: dict[str, str] = {}
        self._load: Counter[str] = Counter()
        self._home: dict[str, str] = {}

    @property
    def healthy(self) -> list[str]:
        """Names of the engines that serve."""
        return [name for name in self.engines if name not in self._aside]

    @property
    def aside(self) -> dict[str, str]:
        """Why each engine that is set aside does not serve."""
        return dict(self._aside)

    def set_aside(self, name: str, reason: str) -> None:
        """Send no more requests to this engine."""
        if name not in self._aside:
            _log.warning("engine %s is set aside: %s", name, reason)
        self._aside[name] = reason

    def put_back(self, name: str) -> None:
        """Send requests again; no error if it serves already."""
        self._aside.pop(name, None)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate on the session's engine, or on another if that one is gone.

        Raises:
            EpisodeError: no engine serves, or the engine's own error.
        """
        tried: set[str] = set()
        while True:
            name = self._choose(request.session, tried)
            self._load[name] += 1
            try:
                return await self.engines[name].generate(request)
            except EpisodeError as error:
                if error.failure.kind != "unreachable" or not set(self.healthy) - tried - {name}:
                    raise
                tried.add(name)
                self.regenerated += 1
            finally:
                self._load[name] -= 1

    def end_session(self, session: str) -> None:
        """Forget where a session was served."""
        self._home.pop(session, None)

    def _choose(self, session: str, tried: set[str]) -> str:
        home = self._home.get(session)
        candidates = [name for name in self.healthy if name not in tried]
        if home in candidates:
            return home  # type: ignore[return-value]
        if not candidates:
            reasons = "; ".join(f"{name}: {why}" for name, why in self._aside.items()) or "none was started"
            raise EpisodeError(Boundary.ENGINE, "none_healthy", f"no engine serves this policy ({reasons})")
        chosen = min(candidates, key=lambda name: (self._load[name], name))
        self._home[session] = chosen
        return chosen
