"""The sandboxes of one keeper: made, kept warm, attached to, and ended when nobody uses them any more."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

from agentrl import codec
from agentrl.process.ports import LOOPBACK
from agentrl.sandbox.backend import Backend, Place
from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.effects import EffectLog
from agentrl.types.errors import Boundary, EpisodeError, deadline
from agentrl.types.sandbox import Command, Guarantee, SandboxSpec

_CLOSE_S, _SNAPSHOT_S = 60.0, 120.0
UNKNOWN_S = 10.0
"""How long a sandbox waits for who opened it to come back, as long as nobody else knows its handle."""
COUNTED = ("opened", "opened_warm", "attached", "abandoned", "commands", "timeouts", "stopped", "out_of_memory")
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class KeptSandbox:
    """A live sandbox; who has `token` may use it. `users` counts connections, `left` is when the last one went.

    Its end frees a place of `room`.
    """

    handle: str
    place: Place
    room: asyncio.Semaphore
    counts: Counter[str]
    token: int = 0
    state: bytes | None = None
    is_kept: bool = False
    """Whether its handle is known to others than who opened it."""
    users: int = 0
    left: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    effects: EffectLog = field(init=False)

    def __post_init__(self) -> None:
        self.effects = EffectLog(self.place, self.lock, self.counts)

    def check(self, token: int) -> None:
        """Raises EpisodeError (boundary sandbox, kind fenced) unless the token is the newest."""
        if token != self.token:
            message = f"another worker has gone on in sandbox {self.handle} under token {self.token}, this has {token}"
            raise EpisodeError(Boundary.SANDBOX, "fenced", message)


class WarmPlaces:
    """Fresh places of the specs that were asked for last, at most `most` in all, made when one is taken."""

    def __init__(self, backend: Backend, most: int) -> None:
        self._backend, self._most = backend, most
        self._places: OrderedDict[bytes, deque[Place]] = OrderedDict()
        self._making: set[asyncio.Task[None]] = set()

    def take(self, spec: SandboxSpec) -> Place | None:
        """A fresh place if there is one; another is made in the background."""
        places = self._places.setdefault(_key(spec), deque())
        self._places.move_to_end(_key(spec))
        # Without one at hand two are begun, until there are as many as can be.
        for _ in range(1 if places else 2):
            if self._most and len(self._making) < self._most:
                task = asyncio.create_task(self._make(spec), name="warm-sandbox")
                self._making.add(task)
                task.add_done_callback(self._making.discard)
        return places.popleft() if places else None

    async def close(self) -> None:
        """End all of them."""
        for task in self._making:
            task.cancel()
        await asyncio.gather(*self._making, return_exceptions=True)
        for places in self._places.values():
            await asyncio.gather(*(place.close() for place in places))
        self._places.clear()

    async def _make(self, spec: SandboxSpec) -> None:
        if not await self._has_room(_key(spec)):
            return
        try:
            place = await self._backend.create(spec)
        except EpisodeError as error:
            _log.warning("no sandbox could be made ahead: %s", error)
            return
        # Others may have been made meanwhile.
        if await self._has_room(_key(spec)):
            self._places.setdefault(_key(spec), deque()).append(place)
        else:
            await place.close()

    async def _has_room(self, key: bytes) -> bool:
        return sum(map(len, self._places.values())) < self._most or await self._end_oldest(key)

    async def _end_oldest(self, key: bytes) -> bool:
        """Make room by ending a place of the spec that was asked for longest ago; False if all are of this one."""
        for other in list(self._places):
            if other != key and self._places[other]:
                await self._places[other].popleft().close()
                return True
            if other != key:
                del self._places[other]
        return False


class SandboxTable:
    """All sandboxes of a machine that live, by handle; the machine's address is the first part of each."""

    def __init__(self, backend: Backend, config: SandboxConfig, host: str = LOOPBACK) -> None:
        self.backend = backend
        self._config, self._host = config, host
        self._kept: dict[str, KeptSandbox] = {}
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        """How often things happened since the keeper began, by the names in `COUNTED`."""
        # Who has a sandbox and wants another one does not wait for those who have one and want another one.
        self._room, self._room_beside = asyncio.Semaphore(config.most), asyncio.Semaphore(config.most)
        self._warm = WarmPlaces(backend, config.warm)
        self._snapshots = itertools.count()

    def __len__(self) -> int:
        return len(self._kept)

    async def open(self, spec: SandboxSpec, snapshot: str | None, beside: str | None) -> KeptSandbox:
        """A sandbox of its own, maybe for one who has one already, as a verifier.

        Waits for: room, and the backend. Unblocked by: the end of another one, or `open_s`.

        Raises:
            EpisodeError: boundary sandbox: the backend does not enforce what is asked (kind guarantee), or cannot.
        """
        _check_guarantees(self.backend, spec.asked)
        room = self._room_beside if beside in self._kept else self._room
        async with deadline("sandbox.open", self._config.open_s):
            await room.acquire()
            try:
                warm = self._warm.take(spec) if snapshot is None else None
                place = warm or await self.backend.create(spec, snapshot)
            except BaseException:
                room.release()
                raise
        kept = KeptSandbox(f"{self._host}/{secrets.token_hex(8)}", place, room, self.counts)
        self.counts["opened"] += 1
        self.counts["opened_warm"] += warm is not None
        self._kept[kept.handle] = kept
        return kept

    def attach(self, handle: str, token: int) -> KeptSandbox:
        """A live sandbox for the holder of a token. Raises EpisodeError (boundary sandbox, kinds lost and fenced)."""
        kept = self._find(handle)
        if token < kept.token:
            kept.check(token)
        kept.token = token
        self.counts["attached"] += 1
        return kept

    def held(self, handle: str, token: int) -> KeptSandbox:
        """A live sandbox for who has it already. Raises EpisodeError (boundary sandbox, kinds lost and fenced)."""
        kept = self._find(handle)
        kept.check(token)
        return kept

    async def snapshot(self, kept: KeptSandbox) -> str:
        """Keep a sandbox's files. Waits for: its command. Unblocked by: the end of that, or two minutes."""
        name = f"snapshot-{next(self._snapshots)}"
        async with deadline("sandbox.snapshot", _SNAPSHOT_S), kept.lock:
            await kept.place.snapshot(name)
        return name

    async def end(self, kept: KeptSandbox) -> None:
        """End a sandbox with all that runs in it; safe to call twice."""
        if self._kept.pop(kept.handle, None) is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await kept.effects.end()
                await kept.place.close()
        except (EpisodeError, TimeoutError, OSError) as error:
            _log.warning("sandbox %s could not be removed: %r", kept.handle, error)
        finally:
            kept.room.release()

    async def end_abandoned(self) -> None:
        """End those that nobody has used for `abandoned_s`; sooner where nobody but the one that left knows of it."""
        for kept in list(self._kept.values()):
            # Asked anew for each, since somebody may have come back to it while another one was ended.
            limit_s = self._config.abandoned_s if kept.is_kept else min(UNKNOWN_S, self._config.abandoned_s)
            if kept.users or kept.left > time.monotonic() - limit_s:
                continue
            _log.warning("sandbox %s is ended, nobody came back to it", kept.handle)
            self.counts["abandoned"] += 1
            await self.end(kept)

    def _find(self, handle: str) -> KeptSandbox:
        if handle not in self._kept:
            is_here = handle.partition("/")[0] == self._host
            why = f"no sandbox {handle} lives here any more" if is_here else f"sandbox {handle} is not on {self._host}"
            raise EpisodeError(Boundary.SANDBOX, "lost", why)
        return self._kept[handle]

    async def close(self) -> None:
        """End all."""
        await asyncio.gather(*(self.end(kept) for kept in list(self._kept.values())))
        await self._warm.close()
        await self.backend.close()


def check_command(backend: Backend, command: Command) -> None:
    """Raises EpisodeError (boundary sandbox, kind guarantee) if a command asks for a gateway and there can be none."""
    if command.gateway is not None:
        _check_guarantees(backend, frozenset({Guarantee.GATEWAY}))


def _check_guarantees(backend: Backend, asked: frozenset[Guarantee]) -> None:
    lacking = sorted(asked - backend.guarantees)
    if lacking:
        by_reason: dict[str, list[str]] = {}
        for lack in lacking:
            by_reason.setdefault(backend.missing.get(lack, "not by this backend"), []).append(lack)
        reasons = "; ".join(f"{', '.join(named)}: {reason}" for reason, named in by_reason.items())
        raise EpisodeError(
            Boundary.SANDBOX, "guarantee", f"the task asks for what this sandbox does not enforce here: {reasons}"
        )


def _key(spec: SandboxSpec) -> bytes:
    return codec.encode(spec)
