from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.buffer.config import BufferConfig
from agentrl.orchestration.policy_loop import PolicyLoop
from agentrl.telemetry.run_traces import RunTraces
from agentrl.types.batch import StepReport, TrainBatch, TrainEpisode, WeightsManifest
from agentrl.types.errors import StalledError
from agentrl.types.version import PolicyVersion


class Machine:
    """What training drives: a buffer that withholds every episode, a trainer, a recorder, a run's folder."""

    def __init__(self) -> None:
        self.journal = self
        self.steps = 0

    async def take(self, policy: str, version: PolicyVersion) -> TrainBatch:
        return TrainBatch(policy, version, (TrainEpisode("train-000000-0", 0, 1.0, ()),))

    async def step(self, batch: TrainBatch) -> StepReport:
        self.steps += 1
        return StepReport(batch.version.next())

    async def stage(self, version: PolicyVersion, folder: Path) -> WeightsManifest:
        return WeightsManifest("main", version, str(folder), {}, 0)

    def weights(self, policy: str, version: PolicyVersion) -> Path:
        return Path("weights") / policy / str(version)

    async def trained(self, *_: Any) -> None: ...

    async def stepped(self, *_: Any) -> None: ...

    def record_step(self, *_: Any) -> None: ...


async def _nothing(loop: PolicyLoop) -> None:
    """Nothing follows a step."""


async def test_a_run_whose_every_episode_is_withheld_ends_before_its_last_step():
    machine = Machine()
    config = SimpleNamespace(
        steps=100,
        buffer_of=lambda policy: BufferConfig(max_staleness=1, staleness="withhold"),
    )
    start = SimpleNamespace(versions={"main": PolicyVersion(0, 0)})
    policies = {"main": SimpleNamespace(trainer=machine, serving=SimpleNamespace(metrics=dict))}
    parts = SimpleNamespace(
        config=config,
        buffer=machine,
        recorder=machine,
        start=start,
        policies=policies,
        run=machine,
        pool=SimpleNamespace(metrics=dict),
        scoring=SimpleNamespace(counts={}),
        snapshots=(),
        traces=RunTraces(),
        trainer=lambda policy: machine,
        counted=lambda policy: {},
    )
    with pytest.raises(StalledError, match=r"policy 'main' has not one token .* 6 steps .*buffer.max_staleness = 1"):
        await PolicyLoop(parts, "main", asyncio.Event()).train(_nothing)
    assert machine.steps == 5
