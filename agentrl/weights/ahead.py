"""Whether an engine takes weights ahead of its pause."""

from __future__ import annotations

from http import HTTPStatus

from agentrl.protocols import Engine
from agentrl.types.errors import EngineRefusedError
from agentrl.types.version import PolicyVersion


class AheadEngines:
    """Knows which engines have ``/stage_weights``: ours do, and then a swap only exchanges pointers; SGLang has not.

    With `in_place` requests keep their KV, and such engines exchange between two steps, without a pause.

    Example: ``await ahead.includes(engine)`` asks an engine once, until it is forgotten.
    """

    def __init__(self, in_place: bool) -> None:
        self._in_place = in_place
        self._known: dict[str, bool] = {}

    async def includes(self, engine: Engine) -> bool:
        """Ask by a call that stages nothing. Raises EngineError if the engine cannot be reached."""
        if engine.name not in self._known:
            try:
                await engine.control("/stage_weights", {})
            except EngineRefusedError as error:
                self._known[engine.name] = error.status != HTTPStatus.NOT_FOUND
        return self._known.get(engine.name, True)

    async def needs_pause(self, engine: Engine) -> bool:
        """Whether the engine must stand still for new weights. Raises EngineError as `includes` does."""
        return not (self._in_place and await self.includes(engine))

    async def swap(self, engine: Engine, version: PolicyVersion) -> None:
        """Serve what was staged as this version. Raises EngineError."""
        body = {"weight_version": str(version), "in_place": self._in_place, "flush_cache": not self._in_place}
        await engine.update("/swap_weights", body)

    def forget(self, name: str) -> None:
        """It may come back as another kind of server."""
        self._known.pop(name, None)
