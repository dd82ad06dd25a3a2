"""The engines of one policy and what is known of each: who serves, which weights, and why not.

States and who moves them::

    STARTING --receipt--> HEALTHY --missed probe--> SUSPECT --answer--> HEALTHY or STALE
                             |  failed publish, wrong span   |
                             v                               v  no answer for long, process ended
                           STALE --receipt--> HEALTHY       DEAD --restarted--> STALE

Only a receipt makes an engine HEALTHY: the publisher gives it, nobody else. An engine that is paused for
its weights stays HEALTHY; requests sent to it wait inside. One that is to finish first is held: it stays HEALTHY, and
no request is sent to it until it has its weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from agentrl.protocols import Engine
from agentrl.types.version import PolicyVersion

_KEPT_VERSIONS = 64
_KEPT_STANDS = 64
_log = logging.getLogger(__name__)


class EngineState(StrEnum):
    """What an engine may be used for: only a healthy one serves, a dead one cannot even be asked."""

    STARTING = "starting"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    STALE = "stale"
    DEAD = "dead"


@dataclass(slots=True, eq=False)
class Member:
    """One engine of the fleet.

    `served` are the versions that receipts have proven, oldest first. `proving` is the version between a
    swap and its receipt; a reply that holds it waits for `proof`. `unreachable` is done when replies can no
    longer come. `update_lock` is held by whoever changes the engine's weights; `phase` is what the publisher does
    there, or failed at, until a receipt has come. `proofs` counts receipts: an engine that gave one since a request
    failed there is as good as another engine. While `is_held` no request is sent to it; `num_requests` are those of
    this fleet that are with it. `stands` are its last stretches of standing still for weights, by the monotonic clock.
    """

    engine: Engine
    state: EngineState
    reason: str = ""
    served: list[PolicyVersion] = field(default_factory=list)
    proving: PolicyVersion | None = None
    proof: asyncio.Event = field(default_factory=asyncio.Event)
    update_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    phase: str = ""
    proofs: int = 0
    is_held: bool = False
    num_requests: int = 0
    stands: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT_STANDS))
    _stands_since_s: float | None = None
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _unreachable: asyncio.Future[None] | None = None

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.engine.name

    @property
    def version(self) -> PolicyVersion:
        """The newest proven version."""
        return self.served[-1]

    @property
    def unreachable(self) -> asyncio.Future[None]:
        """Done once the engine is dead, or was set aside and given up."""
        if self._unreachable is None:
            self._unreachable = asyncio.get_running_loop().create_future()
        return self._unreachable

    def may_report(self, since: PolicyVersion) -> set[PolicyVersion]:
        """Versions that tokens may name of a request sent while `since` was the newest proven one."""
        first = self.served.index(since) if since in self.served else 0
        return set(self.served[first:])

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request is with the engine inside."""
        self.num_requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_requests -= 1
            if not self.num_requests:
                self._idle.set()

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """The engine is paused for new weights inside."""
        self._stands_since_s = started_s = time.monotonic()
        try:
            yield
        finally:
            self._stands_since_s = None
            self.stands.append((started_s, time.monotonic()))

    def stood_still(self, since_s: float, until_s: float) -> list[tuple[float, float]]:
        """The parts of a stretch in which the engine stood still for new weights."""
        now = [] if self._stands_since_s is None else [(self._stands_since_s, until_s)]
        cut = [(max(start_s, since_s), min(end_s, until_s)) for start_s, end_s in (*self.stands, *now)]
        return [(start_s, end_s) for start_s, end_s in cut if start_s < end_s]

    async def wait_until_idle(self) -> None:
        """Waits for: the end of all requests with the engine. Unblocked by: it; callers set the deadline."""
        while self.num_requests:
            await self._idle.wait()

    def fail_pending(self) -> None:
        """Tell everybody who waits for a reply that none will come."""
        if not self.unreachable.done():
            self.unreachable.set_result(None)

    def accept_replies(self) -> None:
        """Replies may come again."""
        if self.unreachable.done():
            self._unreachable = None

    def replace_by(self, engine: Engine) -> None:
        """Another process has taken this one's place."""
        self.engine, self._unreachable = engine, None


class Fleet:
    """Registry of one policy's engines; every change of state goes through it and wakes who waits.

    `newest` is the version that was published last; an engine that missed it does not serve. `restarts` counts
    processes that took a dead one's place, `distrusted` how often an engine was set aside for tokens, or a version, of
    weights that it was not proven to hold.

    Example: ``Fleet([client_a, client_b], PolicyVersion(0, 0))`` starts with both healthy at 0.0.
    """

    def __init__(self, engines: Iterable[Engine], version: PolicyVersion) -> None:
        self.members = {e.name: Member(e, EngineState.HEALTHY, served=[version]) for e in engines}
        self.newest = self._first = version
        self.restarts = self.distrusted = 0
        self._calls_repeated_before = 0
        self._changed = asyncio.Event()

    @property
    def healthy(self) -> list[str]:
        """Names of the engines that serve."""
        return [name for name, member in self.members.items() if member.state is EngineState.HEALTHY]

    @property
    def open(self) -> list[str]:
        """Names of the engines that serve and take new requests."""
        return [name for name in self.healthy if not self.members[name].is_held]

    def is_held(self, name: str) -> bool:
        """Whether an engine serves, but takes no new requests for now."""
        return self.members[name].state is EngineState.HEALTHY and self.members[name].is_held

    @property
    def stale(self) -> list[str]:
        """Names of the engines that are alive and wait for weights."""
        return [name for name, member in self.members.items() if member.state is EngineState.STALE]

    @property
    def aside(self) -> dict[str, str]:
        """Why each engine that does not serve does not."""
        return {n: m.reason for n, m in self.members.items() if m.state is not EngineState.HEALTHY}

    def metrics(self) -> dict[str, float]:
        """Engines by state and what was counted of them, under ``engines/``."""
        states = [member.state for member in self.members.values()]
        repeated = sum(member.engine.repeated_calls.total() for member in self.members.values())
        return {
            **{f"engines/{state}": float(states.count(state)) for state in EngineState},
            "engines/restarts_total": float(self.restarts),
            "engines/distrusted_total": float(self.distrusted),
            "engines/repeated_calls_total": float(self._calls_repeated_before + repeated),
        }

    def set_aside(self, name: str, reason: str) -> None:
        """The engine lives but is not believed, and must prove its weights before it serves again."""
        self.distrusted += 1
        self._move(self.members[name], EngineState.STALE, reason)

    def suspect(self, name: str, reason: str) -> None:
        """The engine missed a probe: it gets no new requests, those it has may still return."""
        if self.members[name].state is EngineState.HEALTHY:
            self._move(self.members[name], EngineState.SUSPECT, reason)

    def clear_suspicion(self, name: str) -> None:
        """The engine answers again, and it serves what it served; it is stale if that is no longer the newest."""
        member = self.members[name]
        if member.state is not EngineState.SUSPECT:
            return
        if member.version == self.newest:
            self._move(member, EngineState.HEALTHY, "")
        else:
            self._move(member, EngineState.STALE, f"missed version {self.newest} while it was suspect")

    def dead(self, name: str, reason: str) -> None:
        """No reply comes from it any more; its requests go elsewhere from their tokens."""
        member = self.members[name]
        during = f" (weights: in the phase {member.phase})" if member.phase else " (in the phase generate)"
        self._move(member, EngineState.DEAD, f"{reason}{during}")
        member.fail_pending()

    def restarted(self, name: str, engine: Engine) -> None:
        """A new process took the dead one's place; it must prove its weights."""
        member = self.members[name]
        self.restarts += 1
        self._calls_repeated_before += member.engine.repeated_calls.total()
        member.replace_by(engine)
        self._move(member, EngineState.STALE, "restarted, holds its first weights")

    def joined(self, engine: Engine) -> None:
        """One more engine, which holds the first weights; it must prove newer ones."""
        member = self.members[engine.name] = Member(engine, EngineState.STARTING, served=[self._first])
        self._move(member, EngineState.STALE, "has joined, holds its first weights")

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """No request is sent to the engine inside; those that have no other engine wait."""
        member = self.members[name]
        member.is_held = True
        try:
            yield
        finally:
            member.is_held = False
            self._changed.set()

    def begin_proof(self, name: str, version: PolicyVersion) -> None:
        """The engine swaps to a version; replies that hold it wait for the verdict."""
        member = self.members[name]
        member.proving, member.proof = version, asyncio.Event()

    def proven(self, name: str) -> None:
        """The receipt is right: the engine serves the version under proof."""
        member = self.members[name]
        if member.proving is not None:
            member.served = [*member.served, member.proving][-_KEPT_VERSIONS:]
        member.phase = ""
        member.proofs += 1
        self._end_proof(member)
        if member.state is not EngineState.DEAD:
            member.accept_replies()
            self._move(member, EngineState.HEALTHY, "")

    def disproven(self, name: str, reason: str) -> None:
        """The swap or its receipt failed: what it writes under the version is not believed."""
        member = self.members[name]
        if member.state is not EngineState.DEAD:
            self._move(member, EngineState.STALE, reason)
        self._end_proof(member)

    def abandon(self, name: str) -> None:
        """Replies that an engine set aside has not given by now are not waited for; they go elsewhere."""
        if self.members[name].state is not EngineState.HEALTHY:
            self.members[name].fail_pending()

    async def wait_for_change(self) -> None:
        """Waits for: any change of state. Unblocked by: it; callers set the deadline."""
        self._changed.clear()
        await self._changed.wait()

    def describe(self) -> str:
        """Why each engine does not serve, for an error message."""
        held = {name: "is held back for its weights" for name, m in self.members.items() if m.is_held}
        return "; ".join(f"{name}: {why}" for name, why in {**held, **self.aside}.items()) or "none was started"

    def _end_proof(self, member: Member) -> None:
        member.proving = None
        member.proof.set()

    def _move(self, member: Member, state: EngineState, reason: str) -> None:
        if state is not EngineState.HEALTHY and (state, reason) != (member.state, member.reason):
            _log.warning("engine %s is %s: %s", member.name, state, reason)
        member.state, member.reason = state, reason
        self._changed.set()
