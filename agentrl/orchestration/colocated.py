"""A trainer on the devices of its policy's engines, which make room for each of its steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.inference.calls import LostAnswerError
from agentrl.inference.fleet import EngineState, Fleet, Member
from agentrl.protocols import Engine, Trainer
from agentrl.types.batch import Canary, StepReport, TrainBatch, WeightsManifest
from agentrl.types.errors import EngineError
from agentrl.types.version import PolicyVersion


@dataclass(slots=True)
class _Stand:
    """What one step had engines do; `paused` has the clock's time at which each stood still, in seconds."""

    engines: Mapping[str, Engine]
    paused: dict[str, float] = field(default_factory=dict)
    interrupted: int = 0
    paused_s: float = 0.0
    failed: int = 0

    def metrics(self) -> dict[str, float]:
        """By name, under ``colocated/``."""
        return {
            "colocated/paused_s": self.paused_s,
            "colocated/interrupted_requests": float(self.interrupted),
            "colocated/failed_engines": float(self.failed),
        }


class ColocatedTrainer(Trainer):
    """Steps while the engines of its policy stand still without a KV cache; between steps they have their memory.

    Requests that a pause interrupts come back with what they have, and wait at the router for the end of the step. Who
    changes an engine's weights, or looks after it, has its `update_lock`: a publication under way ends first, and the
    next one waits. An engine that does not obey is set aside, and serves again once it has proven its weights, which
    takes a token that it draws. One that may have released its memory is told to take it again, after every step,
    until it has.
    """

    def __init__(self, trainer: Trainer, fleet: Fleet) -> None:
        self._trainer, self._fleet = trainer, fleet
        self._released: dict[str, Engine] = {}

    async def step(self, batch: TrainBatch, is_redo: bool = False) -> StepReport:
        """The wrapped trainer's step.

        Waits for: publications under way, every engine's pause, the step, every engine's return. Unblocked by: the
        deadlines of their calls.
        """
        members = list(self._fleet.members.values())
        async with AsyncExitStack() as standing:
            for member in members:
                await standing.enter_async_context(member.update_lock)
            for member in members:
                standing.enter_context(self._fleet.held(member.name))
            stand = _Stand({member.name: member.engine for member in members})
            try:
                await asyncio.gather(*(self._make_room(member, stand) for member in members))
                report = await self._trainer.step(batch, is_redo)
            finally:
                await asyncio.gather(*(self._bring_back(member, stand) for member in members))
        return replace(report, metrics={**report.metrics, **stand.metrics()})

    async def canary(self, token_ids: list[int]) -> Canary:
        """The wrapped trainer's."""
        return await self._trainer.canary(token_ids)

    async def stage(self, version: PolicyVersion, folder: Path) -> WeightsManifest:
        """By the wrapped trainer, while engines generate."""
        return await self._trainer.stage(version, folder)

    async def save(self, folder: Path) -> None:
        """By the wrapped trainer, while engines generate."""
        await self._trainer.save(folder)

    async def restore(self, folder: Path) -> None:
        """By the wrapped trainer."""
        await self._trainer.restore(folder)

    async def rebase(self, version: PolicyVersion) -> None:
        """By the wrapped trainer."""
        await self._trainer.rebase(version)

    async def close(self) -> None:
        """End the wrapped trainer."""
        await self._trainer.close()

    async def _make_room(self, member: Member, stand: _Stand) -> None:
        """Waits for: an engine's pause and release. Unblocked by: the deadlines of the calls."""
        engine = member.engine
        if member.state is EngineState.DEAD:
            return
        try:
            stand.interrupted += await engine.pause()
            stand.paused[member.name] = time.monotonic()
            if self._released.get(member.name) is not engine:
                await self._release(member.name, engine)
        except EngineError as error:
            self._has_failed(member, stand, f"made no room for the trainer: {error}")

    async def _release(self, name: str, engine: Engine) -> None:
        """Raises EngineError; after a LostAnswerError the engine may have released its memory."""
        try:
            await engine.release_memory()
        except LostAnswerError:
            self._released[name] = engine
            raise
        self._released[name] = engine

    async def _bring_back(self, member: Member, stand: _Stand) -> None:
        """Waits for: an engine's return. Unblocked by: the deadlines of the calls."""
        engine = stand.engines[member.name]
        if member.engine is not engine or member.state is EngineState.DEAD:
            self._released.pop(member.name, None)  # its process is gone, and with it what was released
            return
        try:
            if member.name in self._released:
                await engine.resume_memory()
                del self._released[member.name]
            # One that was set aside generates again once it has proven what it serves.
            if member.state in (EngineState.HEALTHY, EngineState.SUSPECT):
                await engine.resume()
        except EngineError as error:
            self._has_failed(member, stand, f"did not come back after the trainer's step: {error}")
        if (paused := stand.paused.get(member.name)) is not None:
            stand.paused_s += time.monotonic() - paused

    def _has_failed(self, member: Member, stand: _Stand, reason: str) -> None:
        stand.failed += 1
        if member.state is not EngineState.DEAD:
            self._fleet.set_aside(member.name, reason)
