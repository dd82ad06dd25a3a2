"""Which version a resumed run goes on as, by what its trainer makes of the steps on record."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.buffer.recovery import Recovered, TakenStep
from agentrl.buffer.staleness import train_view
from agentrl.journal.entries import Stepped
from agentrl.orchestration.redo import Redo, weights_digest
from agentrl.orchestration.run_journal import RunJournal
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.types.batch import StepReport, TrainBatch, TrainEpisode, WeightsManifest
from agentrl.types.version import PolicyVersion


def version(epoch: int, step: int) -> PolicyVersion:
    return PolicyVersion(epoch, step)


def manifest(name: str, at: PolicyVersion) -> WeightsManifest:
    return WeightsManifest("main", at, f"/weights/{at}", {"weight": name}, 4)


def served(name: str, at: PolicyVersion) -> Stepped:
    return Stepped("main", at, weights_digest(manifest(name, at)))


@dataclass
class Machine:
    """Everything that a redo drives: the trainer makes the named weights, one after the other."""

    makes: list[str]
    at: PolicyVersion = field(default_factory=lambda: version(0, 0))
    events: list[str] = field(default_factory=list)
    name: str = "first"
    fresh_tokens: list[int] = field(default_factory=list)

    async def step(self, batch: TrainBatch, is_redo: bool = False) -> StepReport:
        assert is_redo
        assert batch.version == self.at
        self.fresh_tokens.append(int(batch.episodes[0].trajectories[0].fresh.sum()))
        self.name, self.at = self.makes.pop(0), self.at.next()
        return StepReport(self.at)

    async def stage(self, at: PolicyVersion, folder: Path) -> WeightsManifest:
        assert at == self.at
        return manifest(self.name, at)

    async def rebase(self, at: PolicyVersion) -> None:
        assert at.step == self.at.step
        self.at = at

    async def publish(self, staged: WeightsManifest) -> None:
        self.events.append(f"publish {staged.version} {staged.checksums['weight']}")

    async def stepped(self, policy: str, at: PolicyVersion, digest: str) -> None:
        self.events.append(f"record {at}")

    async def trained(self, policy: str, at: PolicyVersion) -> None:
        self.events.append(f"trained {at}")

    async def loaded(self, policy: str, at: PolicyVersion) -> None:
        """Places come back."""

    async def retake(self, taken: TakenStep) -> TrainBatch:
        episode = build_episode(build_ticket(), [(2, taken.step)])
        views = train_view(episode, "main", taken.version, 1)
        return TrainBatch("main", taken.version, (TrainEpisode("e", 0, 1.0, views),))

    def weights(self, policy: str, at: PolicyVersion) -> Path:
        return Path(f"/weights/{at}")

    def on_phase(self, text: str) -> None:
        """Nobody watches."""

    def last_step(self, policy: str) -> int:
        return 1

    def record_step(self, policy: str, report: StepReport, batch: TrainBatch, *arguments: Any) -> None:
        self.events.append(f"metrics {report.version} of a batch at {batch.version}")


async def redo(
    machine: Machine, steps: int, *on_record: Stepped, epoch: int = 0, is_salvaged: bool = False
) -> PolicyVersion:
    taken = tuple(TakenStep("main", version(0, n), ()) for n in range(steps))
    by_epoch = sorted(on_record, key=lambda entry: entry.version.epoch)
    journal = RunJournal.none()
    journal.recovered = Recovered(redo={"main": taken} if taken else {})
    journal.served = {"main": {entry.version.step: entry for entry in by_epoch}}
    journal.epoch, journal.is_salvaged = epoch, is_salvaged
    journal.buffer = machine  # type: ignore[assignment]
    policies = {"main": SimpleNamespace(trainer=machine, serving=SimpleNamespace(publisher=machine))}
    parts = SimpleNamespace(
        journal=journal, start=SimpleNamespace(versions={"main": machine.at}), policies=policies, buffer=machine,
        run=machine, observer=machine, recorder=machine, trainer=lambda policy: machine, counted=lambda policy: {},
    )  # fmt: skip
    work = Redo(parts, "main")  # type: ignore[arg-type]
    await work.run()
    assert work.version == machine.at
    assert work.staged.version == work.version
    return work.version


async def test_the_same_weights_are_the_same_version() -> None:
    machine = Machine(["a", "b"])
    assert await redo(machine, 2, served("a", version(0, 1)), served("b", version(0, 2))) == version(0, 2)
    assert machine.events == ["trained 0.1", "trained 0.2", "metrics 0.2 of a batch at 0.1", "publish 0.2 b"]


async def test_other_weights_are_of_a_new_epoch() -> None:
    machine = Machine(["a", "x"])
    assert await redo(machine, 2, served("b", version(0, 2)), epoch=0) == version(1, 2)
    assert machine.events[-2:] == ["record 1.2", "publish 1.2 x"]


async def test_weights_that_an_earlier_resume_made_keep_its_epoch() -> None:
    """Else tokens of the first life, which were of other weights, would pass for tokens of these."""
    machine = Machine(["a", "x"])
    found = await redo(machine, 2, served("b", version(0, 2)), served("x", version(1, 2)), epoch=1)
    assert found == version(1, 2)
    assert machine.events[-1] == "publish 1.2 x"


async def test_a_step_that_nobody_saw_is_compared_by_the_one_before_it() -> None:
    machine = Machine(["x", "y"])
    assert await redo(machine, 2, served("a", version(0, 1))) == version(1, 2)
    metrics = "metrics 1.2 of a batch at 1.1"  # so tokens of 0.1, which it was taken with, count as orphans
    assert machine.events == ["trained 0.1", "record 1.1", "trained 1.2", metrics, "record 1.2", "publish 1.2 y"]
    assert machine.fresh_tokens == [2, 0], "the weights of epoch 1 drew none of them, and are not held against them"


async def test_steps_that_nobody_saw_need_no_new_epoch() -> None:
    machine = Machine(["x"])
    assert await redo(machine, 1) == version(0, 1)
    assert machine.events == ["trained 0.1", "record 0.1", "publish 0.1 x"]


@pytest.mark.parametrize("steps", [0, 1])
async def test_after_a_salvage_the_epoch_rises_whatever_comes_out(steps: int) -> None:
    assert await redo(Machine(["a"]), steps, served("a", version(0, 1)), epoch=2, is_salvaged=True) == version(3, steps)
