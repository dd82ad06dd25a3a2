"""Faults on purpose: an engine in front of an engine that breaks in a chosen way at a chosen phase.

Works with any engine process, embedded or SGLang. What the platform promises under faults is tested by
arming one, letting the run go on, and looking at tokens, versions and times afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar, final

from agentrl.inference.client import EngineClient
from agentrl.protocols import Engine
from agentrl.types.batch import Receipt
from agentrl.types.errors import Boundary, EngineError, EpisodeError
from agentrl.types.generation import Generation, GenerationRequest
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import FolderWeights, WeightGroup, WeightSource
from agentrl.weights.sentinel import SENTINEL_SESSION

T = TypeVar("T")


class FaultKind(StrEnum):
    """What goes wrong."""

    KILL = "kill"
    HANG = "hang"
    SLOW = "slow"
    LOST_REPLY = "lost_reply"
    DUPLICATED = "duplicated"
    WRONG_WEIGHTS = "wrong_weights"
    OLD_WEIGHTS = "old_weights"


class FaultPhase(StrEnum):
    """The call at which it goes wrong."""

    GENERATE = "generate"
    PREPARE = "prepare"
    PAUSE = "pause"
    SWAP = "swap"
    RECEIPT = "receipt"
    RESUME = "resume"
    CANARY = "canary"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Example: ``Fault(FaultKind.HANG, FaultPhase.SWAP)``."""

    kind: FaultKind
    phase: FaultPhase

    def __str__(self) -> str:
        return f"{self.kind} at {self.phase}"


@dataclass(frozen=True, slots=True)
class Victim:
    """What a fault does its harm to: the engine's process group, and other weights of the same shape."""

    pid: int
    wrong_weights: Path
    old_weights: Path
    old_version: PolicyVersion
    slow_s: float = 1.0


@final
class ChaosEngine(Engine):
    """An engine that is well until it is armed; a fault strikes once, at the next call of its phase.

    Kill and hang strike the process just before the call is sent; a lost reply is one that the engine
    has given; a duplicated call is sent twice, as a proxy might; wrong weights are loaded under the right
    label; old weights are loaded behind everybody's back, as by a restart, while the publisher holds no `turn`.
    """

    def __init__(self, engine: EngineClient, victim: Victim) -> None:
        self.name = engine.name
        self._engine, self._victim = engine, victim
        self._armed: Fault | None = None
        self.struck = asyncio.Event()
        self.turn = asyncio.Lock()

    @property
    def repeated_calls(self) -> Counter[str]:
        """Those of the engine."""
        return self._engine.repeated_calls

    def arm(self, fault: Fault) -> None:
        """Strike at the next call of the fault's phase; `struck` is set then."""
        self._armed = fault
        self.struck.clear()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Continue a prompt; a lost reply is an engine that cannot be reached."""
        phase = FaultPhase.CANARY if request.session == SENTINEL_SESSION else FaultPhase.GENERATE
        try:
            return await self._call(phase, lambda: self._engine.generate(request))
        except EngineError as error:
            raise EpisodeError(Boundary.ENGINE, "unreachable", str(error)) from error

    async def score(self, token_ids: Sequence[int], start: int = 1) -> list[float]:
        """What the canary asks for."""
        return await self._call(FaultPhase.CANARY, lambda: self._engine.score(token_ids, start))

    async def pause(self) -> int:
        """Stop generating."""
        return await self._call(FaultPhase.PAUSE, self._engine.pause)

    async def count_requests(self) -> int | None:
        """Never at fault."""
        return await self._engine.count_requests()

    async def resume(self) -> None:
        """Generate again."""
        await self._call(FaultPhase.RESUME, self._engine.resume)

    async def release_memory(self) -> None:
        """Never at fault."""
        await self._engine.release_memory()

    async def resume_memory(self) -> None:
        """Never at fault."""
        await self._engine.resume_memory()

    async def abort_all(self) -> None:
        """Never at fault."""
        await self._engine.abort_all()

    async def abort(self, rid: str) -> None:
        """Never at fault."""
        await self._engine.abort(rid)

    async def stage(self, source: WeightSource, version: PolicyVersion) -> None:
        """Take weights ahead."""
        await self._call(FaultPhase.PREPARE, lambda: self._engine.stage(source, version))

    async def needs_pause(self) -> bool:
        """Never at fault."""
        return await self._engine.needs_pause()

    async def swap(self, source: WeightSource, version: PolicyVersion) -> None:
        """Take weights, the wrong ones if that is the fault."""
        fault = self._armed
        if fault == Fault(FaultKind.WRONG_WEIGHTS, FaultPhase.SWAP):
            self._strike()
            source = FolderWeights(str(self._victim.wrong_weights))
        await self._call(FaultPhase.SWAP, lambda: self._engine.swap(source, version))

    async def join_group(self, group: WeightGroup) -> None:
        """Never at fault."""
        await self._engine.join_group(group)

    async def leave_group(self, name: str) -> None:
        """Never at fault."""
        await self._engine.leave_group(name)

    async def rename(self, version: PolicyVersion) -> None:
        """Never at fault."""
        await self._engine.rename(version)

    async def load_adapter(self, path: str, version: PolicyVersion) -> None:
        """Take an adapter."""
        await self._call(FaultPhase.SWAP, lambda: self._engine.load_adapter(path, version))

    async def receipt(self) -> Receipt:
        """What is served now."""
        return await self._call(FaultPhase.RECEIPT, self._engine.receipt)

    async def ping(self) -> None:
        """Never at fault."""
        await self._engine.ping()

    async def probe(self) -> PolicyVersion:
        """Never at fault."""
        return await self._engine.probe()

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.close()

    async def _call(self, phase: FaultPhase, call: Callable[[], Awaitable[T]]) -> T:
        if self._armed is None or self._armed.phase is not phase:
            return await call()
        fault = self._strike()
        match fault.kind:
            case FaultKind.KILL:
                os.killpg(self._victim.pid, signal.SIGKILL)
            case FaultKind.HANG:
                os.killpg(self._victim.pid, signal.SIGSTOP)
            case FaultKind.SLOW:
                await asyncio.sleep(self._victim.slow_s)
            case FaultKind.OLD_WEIGHTS:
                await self._roll_back(phase)
        answer = await call()
        if fault.kind is FaultKind.DUPLICATED:
            answer = await call()
        if fault.kind is FaultKind.LOST_REPLY:
            raise EngineError(f"engine {self.name}: the reply to {phase} was lost")
        return answer

    def _strike(self) -> Fault:
        fault, self._armed = self._armed, None
        assert fault is not None
        self.struck.set()
        return fault

    async def _roll_back(self, phase: FaultPhase) -> None:
        # A restart interrupts no load; SGLang stands still for ever when two loads and two pauses cross.
        async with self.turn if phase is FaultPhase.GENERATE else contextlib.nullcontext():
            await self._engine.pause()
            await self._engine.swap(FolderWeights(str(self._victim.old_weights)), self._victim.old_version)
            await self._engine.resume()
