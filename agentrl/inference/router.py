"""Routes a policy's requests over its fleet, and lets no token pass under a version it is not of."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import replace

import numpy as np

from agentrl.inference.attempts import Attempts, Cause
from agentrl.inference.fleet import EngineState, Fleet, Member
from agentrl.types.errors import Boundary, EngineBusyError, EngineError, EpisodeError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest
from agentrl.types.version import PolicyVersion

_NO_REPLY = Generation(np.empty(0, np.int32), np.empty(0, np.float32), (), (), FinishReason.ABORT)
_CAUSES = {"unreachable": Cause.DROPPED, "engine.identity": Cause.MISDELIVERED, "busy": Cause.BUSY}
_MISDELIVERIES = 3
_SHORTEST_REST_S = 0.05
_SHORTEST_STAND_S = 1e-4
_PREFIX_TOKENS = 256
_KEPT_PREFIXES = 4096
_ABORT_INTERVAL_S = 0.5
_TELL_S = 1.0
_PREFIX_SLACK = 2  # requests more than the least loaded engine has, and a shared prefix is still worth it


class EngineRouter:
    """Sends each session to one engine: the least loaded when it begins, or one that knows its prompt.

    An engine that does not serve gets no request; its sessions go on elsewhere from their tokens. Nor does one that is
    held: its sessions wait for it, since others may be held next, and one that hangs would be sent all of them; new
    sessions go to others, or wait where there are none. A request whose answer cannot be committed is sent again, to
    another engine first: nothing of it was committed. `resent` counts that by `Cause`, `regenerated` those for which
    tokens may have been drawn in vain, and `interrupted` the replies that an abort cut short. Of an answer that was
    lost nobody knows how long it was: it counts for as many tokens as the one that came in its place. A request waits
    for engines `wait_s` at most, since its first failure or since none served; one that got three answers to other
    requests ends with that; `misdelivering` names the engines that gave such answers.
    """

    def __init__(self, fleet: Fleet, wait_s: float = 0.0) -> None:
        self.fleet = fleet
        self.resent: Counter[Cause] = Counter()
        self.regenerated = 0
        self.interrupted = 0
        self.misdelivering: set[str] = set()
        self._wait_s = wait_s
        self._rests: dict[str, float] = {}
        self._load: Counter[str] = Counter()
        self._home: dict[str, str] = {}
        self._prefixes: OrderedDict[int, str] = OrderedDict()
        self._abandoned: set[asyncio.Task[Generation]] = set()
        self._is_parking, self._none_pending = False, asyncio.Event()
        self._pending: dict[asyncio.Timeout, tuple[Member, str] | None] = {}
        """Requests by what ends them, with the engine that each is with, and the id that it has there."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate on the session's engine, or on another if that one is gone.

        Waits for: an engine's reply. Unblocked by: it, the engine's death, the client's deadline; `give_back`; and
        `wait_s` while no engine serves, or none gives an answer that counts.

        Raises:
            EpisodeError: no engine serves, or the engine's own error.
        """
        if self._is_parking:
            return _NO_REPLY
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._pending[limit] = None
                self._none_pending.clear()
                return await self._generate(request, limit)
        except TimeoutError:
            if not limit.expired():
                raise
            return _NO_REPLY
        finally:
            self._pending.pop(limit, None)
            if not self._pending:
                self._none_pending.set()

    async def give_back(self, within_s: float) -> int:
        """Have all requests end with what they have by now, and later ones with nothing: the run stops.

        Only these are aborted, by their ids: an engine may be in the midst of a proof of its weights. One that waits
        for an engine ends at once. An abort is sent again and again, since a request may be on its way.

        Waits for: what engines have drawn. Unblocked by: that, or `within_s`, after which the rest is lost. Returns how
        many requests lost what was drawn for them.
        """
        self._is_parking = True
        loop = asyncio.get_running_loop()
        ends = loop.time() + within_s
        while (asked := self._end_those_that_wait()) and (now := loop.time()) < ends:
            await asyncio.gather(*(_abort(member, rid, ends) for member, rid in asked.values()))
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(ends, now + _ABORT_INTERVAL_S)):
                    await self._none_pending.wait()
        for limit in asked:
            limit.reschedule(loop.time())
        return len(asked)

    def _end_those_that_wait(self) -> dict[asyncio.Timeout, tuple[Member, str]]:
        """End the requests that are with no engine; returns the others."""
        going_on = {limit: asking for limit, asking in self._pending.items() if not limit.expired()}
        for limit, asking in going_on.items():
            if asking is None:
                limit.reschedule(asyncio.get_running_loop().time())
        return {limit: asking for limit, asking in going_on.items() if asking is not None}

    async def _generate(self, request: GenerationRequest, limit: asyncio.Timeout) -> Generation:
        attempts = Attempts(self._wait_s)
        unbelieved_tokens = 0
        still = _StoodStill()
        while True:
            member = await self._choose(request, attempts, still)
            since, sent_s = member.version, time.monotonic()
            self._load[member.name] += 1
            rid = attempts.rid(request.rid)
            self._pending[limit] = member, rid
            try:
                with member.request():
                    generation = await self._ask(member, replace(request, expects=since, rid=rid))
                answered_s = time.monotonic()
                if await self._passes_fence(member, since, generation):
                    self.interrupted += generation.finish is FinishReason.ABORT
                    num_lost = attempts.num_failed - attempts.causes[Cause.FENCED]
                    again = unbelieved_tokens + num_lost * len(generation.token_ids)
                    still.add(*member.stood_still(sent_s, answered_s), (answered_s, time.monotonic()))
                    return replace(generation, regenerated_tokens=again, stood_still=still.stretches())
                unbelieved_tokens += len(generation.token_ids)
                self._failed(member, attempts, Cause.FENCED, _fence_error(member, since, generation))
            except EpisodeError as error:
                self._failed(member, attempts, _cause(error), error)
            finally:
                self._load[member.name] -= 1
                self._pending[limit] = None

    def metrics(self) -> dict[str, float]:
        """What was counted of requests, under ``requests/``."""
        return {
            **{f"requests/resent_{cause}_total": float(self.resent[cause]) for cause in Cause},
            "requests/regenerated_total": float(self.regenerated),
            "requests/interrupted_total": float(self.interrupted),
            "requests/misdelivering_engines": float(len(self.misdelivering)),
        }

    def end_session(self, session: str) -> None:
        """Forget where a session was served."""
        self._home.pop(session, None)

    async def _ask(self, member: Member, request: GenerationRequest) -> Generation:
        """The engine's reply, or an error as soon as the engine is dead."""
        engine, gone = member.engine, member.unreachable
        asking = asyncio.create_task(engine.generate(request))
        either: set[asyncio.Future[Generation] | asyncio.Future[None]] = {asking, gone}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            asking.cancel()
            await asyncio.wait(either, timeout=_TELL_S, return_when=asyncio.FIRST_COMPLETED)
            self._abandon(asking)
            raise
        if asking.done():
            return asking.result()
        asking.cancel()
        self._abandon(asking)
        raise EpisodeError(Boundary.ENGINE, "unreachable", f"{engine.name} gives no reply any more: {member.reason}")

    def _abandon(self, asking: asyncio.Task[Generation]) -> None:
        """It may try for a while yet to tell an engine that does not answer that nobody waits."""
        if not asking.done():
            self._abandoned.add(asking)
            asking.add_done_callback(self._abandoned.discard)

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

    def _failed(self, member: Member, attempts: Attempts, cause: Cause | None, error: EpisodeError) -> None:
        """Note why a request has to be sent again. Raises the error where it must not be."""
        if cause is None:
            raise error
        attempts.failed(member, cause, error)
        if cause is Cause.MISDELIVERED:
            self.misdelivering.add(member.name)
        if attempts.causes[Cause.MISDELIVERED] == _MISDELIVERIES:
            raise error
        if isinstance(error, EngineBusyError):
            rest_s = max(error.retry_after_s, _SHORTEST_REST_S)
            self._rests[member.name] = asyncio.get_running_loop().time() + rest_s
        self.resent[cause] += 1

    async def _choose(self, request: GenerationRequest, attempts: Attempts, still: _StoodStill) -> Member:
        """An engine that serves and may be asked.

        Waits for: one. Unblocked by: a change of the fleet, the end of a pause between two attempts, the time at which
        a busy engine wants to be asked again, or `wait_s`.
        """
        loop = asyncio.get_running_loop()
        deadline_s = attempts.deadline_s
        while (member := self._find(request, attempts)) is None:
            now = loop.time()
            if now >= deadline_s:
                raise attempts.last or self._none_healthy()
            events = (attempts.not_before_s, *self._rests.values())
            until = min([deadline_s, *(at for at in events if at > now)])
            is_held, waits_since_s = any(map(self.fleet.is_held, self.fleet.members)), time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self.fleet.wait_for_change()
            if is_held:
                still.add((waits_since_s, time.monotonic()))
        self.regenerated += attempts.num_failed > 0
        return member

    def _none_healthy(self) -> EpisodeError:
        message = f"no engine serves this policy ({self.fleet.describe()})"
        return EpisodeError(Boundary.ENGINE, "none_healthy", message)

    def _find(self, request: GenerationRequest, attempts: Attempts) -> Member | None:
        now = asyncio.get_running_loop().time()
        members = self.fleet.members
        serving = [name for name in self.fleet.open if self._rests.get(name, 0.0) <= now]
        home = self._home.get(request.session)
        if home is not None and self.fleet.is_held(home) and attempts.is_new(members[home]):
            return None
        if new := [name for name in serving if attempts.is_new(members[name])]:
            return members[self._place(request, new)]
        if serving and attempts.may_repeat:
            return min((members[name] for name in serving), key=attempts.failed_at_s)
        return None

    def _place(self, request: GenerationRequest, candidates: list[str]) -> str:
        """The session's engine if it is among these, else one that knows its prompt, or the least loaded.

        A session stays with what it is given, but not while an engine is held: those that are not would keep all that
        begin then.
        """
        home = self._home.get(request.session)
        if home in candidates:
            return home
        least = min(candidates, key=lambda name: (self._load[name], name))
        prefix = hash(request.prompt_ids[:_PREFIX_TOKENS].tobytes())
        knowing = self._prefixes.get(prefix)
        chosen = least
        if knowing in candidates and self._load[knowing] <= self._load[least] + _PREFIX_SLACK:
            chosen = knowing
        if self.fleet.open != self.fleet.healthy:
            return chosen
        self._home[request.session] = self._prefixes[prefix] = chosen
        if len(self._prefixes) > _KEPT_PREFIXES:
            self._prefixes.popitem(last=False)
        return chosen


class _StoodStill:
    """When a request waited for new weights: its engine stood still, was held back, or had its proof under way."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._found: list[tuple[float, float]] = []

    def add(self, *stretches: tuple[float, float]) -> None:
        """Note stretches by the monotonic clock, but for those that are too short to be waiting."""
        self._found += [stretch for stretch in stretches if stretch[1] - stretch[0] > _SHORTEST_STAND_S]

    def stretches(self) -> tuple[tuple[float, float], ...]:
        """All of them, counted from when the request came."""
        return tuple((start_s - self._since_s, end_s - self._since_s) for start_s, end_s in self._found)


async def _abort(member: Member, rid: str, ends_s: float) -> None:
    """Ask for a request's end; an engine that does not answer has nothing to give.

    Waits for: its answer. Unblocked by: it, a moment, or the end by the loop's clock.
    """
    with suppress(EngineError, TimeoutError):
        async with asyncio.timeout_at(min(ends_s, asyncio.get_running_loop().time() + _TELL_S)):
            await member.engine.abort(rid)


def _cause(error: EpisodeError) -> Cause | None:
    """Why a request that ended so is sent again; None if the engine has answered it."""
    return _CAUSES.get(error.failure.kind)


def _fence_error(member: Member, since: PolicyVersion, generation: Generation) -> EpisodeError:
    wrote = ", ".join(sorted({str(span.version) for span in generation.versions}))
    message = f"{member.name} wrote under version {wrote}, but is proven to hold {since} since the request was sent"
    return EpisodeError(Boundary.ENGINE, "version", message)
