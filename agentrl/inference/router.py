"""Routes a policy's requests over its fleet, and lets no token pass under a version it is not of."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import replace

from agentrl.inference.fleet import EngineState, Fleet, Member
from agentrl.protocols import Engine
from agentrl.types.errors import Boundary, EngineError, EpisodeError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest
from agentrl.types.version import PolicyVersion

_PREFIX_TOKENS = 256
_KEPT_PREFIXES = 4096
_PREFIX_SLACK = 2  # requests more than the least loaded engine has, and a shared prefix is still worth it


class EngineRouter:
    """Sends each session to one engine: the least loaded when it begins, or one that knows its prompt.

    An engine that does not serve gets no request; its sessions go on elsewhere from their tokens. A
    request that an engine dropped without an answer, or answered under a version that nobody has proven
    (the publish fence), is sent again, once to each engine: nothing of it was committed. The first kind
    is counted in `regenerated`, the second also in `fenced`; replies that an abort cut short are counted in
    `interrupted`. Of an answer that was lost nobody knows how long it was: it counts for as many tokens as the one
    that came in its place. With no engine left to try, a request waits `wait_s` for one to come back.
    """

    def __init__(self, fleet: Fleet, wait_s: float = 0.0) -> None:
        self.fleet = fleet
        self.regenerated = 0
        self.fenced = 0
        self.interrupted = 0
        self._wait_s = wait_s
        self._load: Counter[str] = Counter()
        self._home: dict[str, str] = {}
        self._prefixes: OrderedDict[int, str] = OrderedDict()
        self._abandoned: set[asyncio.Task[Generation]] = set()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate on the session's engine, or on another if that one is gone.

        Waits for: an engine's reply. Unblocked by: it, the engine's death, the client's deadline; and
        `wait_s` while no engine serves.

        Raises:
            EpisodeError: no engine serves, or the engine's own error.
        """
        tried: set[int] = set()
        last: EpisodeError | None = None
        num_lost = unbelieved_tokens = 0
        while True:
            member = await self._choose(request, tried, last)
            engine, since = member.engine, member.version
            self.regenerated += bool(tried)
            self._load[member.name] += 1
            try:
                generation = await self._ask(member, replace(request, expects=since))
                if await self._passes_fence(member, since, generation):
                    self.interrupted += generation.finish is FinishReason.ABORT
                    again = unbelieved_tokens + num_lost * len(generation.token_ids)
                    return replace(generation, regenerated_tokens=again) if again else generation
                self.fenced += 1
                unbelieved_tokens += len(generation.token_ids)
                last = _fence_error(member, since, generation)
            except EpisodeError as error:
                if error.failure.kind != "unreachable":
                    raise
                num_lost += 1
                last = error
            finally:
                self._load[member.name] -= 1
            tried.add(id(engine))

    async def abort_all(self) -> None:
        """Ask every engine that serves to give back what it generates; one that does not answer has nothing to give."""
        for name in self.fleet.healthy:
            with suppress(EpisodeError, EngineError):
                await self.fleet.members[name].engine.abort_all()

    def end_session(self, session: str) -> None:
        """Forget where a session was served."""
        self._home.pop(session, None)

    async def _ask(self, member: Member, request: GenerationRequest) -> Generation:
        """The engine's reply, or an error as soon as the engine is dead."""
        engine, gone = member.engine, member.gone
        asking = asyncio.create_task(engine.generate(request))
        try:
            await asyncio.wait({asking, gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            asking.cancel()
            await asyncio.wait({asking, gone}, return_when=asyncio.FIRST_COMPLETED)
            raise
        if asking.done():
            return asking.result()
        # It may try for a while yet to tell a dead engine that nobody waits.
        asking.cancel()
        self._abandoned.add(asking)
        asking.add_done_callback(self._abandoned.discard)
        raise EpisodeError(Boundary.ENGINE, "unreachable", f"{engine.name} gives no reply any more: {member.reason}")

    async def _passes_fence(self, member: Member, since: PolicyVersion, generation: Generation) -> bool:
        """Whether the engine is proven to have held every version that the tokens name.

        Waits for: the verdict, if a token is of weights under proof. Unblocked by: the publisher's deadlines.
        """
        versions = {span.version for span in generation.versions}
        if member.proving in versions:
            await member.proof.wait()
        if versions <= member.may_report(since):
            return True
        if member.state is EngineState.HEALTHY and member.proving is None:
            error = _fence_error(member, since, generation)
            self.fleet.set_aside(member.name, error.failure.message)
        return False

    async def _choose(self, request: GenerationRequest, tried: set[int], last: EpisodeError | None) -> Member:
        """An engine that serves and was not tried yet.

        Waits for: one. Unblocked by: a change of the fleet, or `wait_s`.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                while (member := self._find(request, tried)) is None:
                    await self.fleet.wait_for_change()
                return member
        except TimeoutError:
            pass
        if (member := self._find(request, tried)) is not None:
            return member
        if last is not None:
            raise last
        message = f"no engine serves this policy ({self.fleet.describe()})"
        raise EpisodeError(Boundary.ENGINE, "none_healthy", message)

    def _find(self, request: GenerationRequest, tried: set[int]) -> Member | None:
        members = self.fleet.members
        candidates = [name for name in self.fleet.healthy if id(members[name].engine) not in tried]
        home = self._home.get(request.session)
        if home in candidates:
            return members[home]  # type: ignore[index]
        if not candidates:
            return None
        least = min(candidates, key=lambda name: (self._load[name], name))
        prefix = hash(request.prompt_ids[:_PREFIX_TOKENS].tobytes())
        knowing = self._prefixes.get(prefix)
        is_worth_it = knowing in candidates and self._load[knowing] <= self._load[least] + _PREFIX_SLACK  # type: ignore[index]
        chosen: str = knowing if is_worth_it else least  # type: ignore[assignment]
        self._home[request.session] = self._prefixes[prefix] = chosen
        if len(self._prefixes) > _KEPT_PREFIXES:
            self._prefixes.popitem(last=False)
        return members[chosen]


def router_of(engine: Engine, version: PolicyVersion) -> EngineRouter:
    """A router over one engine that serves `version`."""
    return EngineRouter(Fleet([engine], version))


def _fence_error(member: Member, since: PolicyVersion, generation: Generation) -> EpisodeError:
    wrote = ", ".join(sorted({str(span.version) for span in generation.versions}))
    message = f"{member.name} wrote under version {wrote}, but is proven to hold {since} since the request was sent"
    return EpisodeError(Boundary.ENGINE, "version", message)
