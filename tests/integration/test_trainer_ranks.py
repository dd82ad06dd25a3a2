"""Trainer ranks as processes: two compute what one does, and their end is told.

Starting processes is slow, so two ranks live one day for all tests: they train with each optimizer, save,
go on from what they saved, and in the end one of them is killed in the middle of a step.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import trainer_worker
from safetensors.torch import load_file
from trainer_worker import ChangingRank

from agentrl.algorithms.config import AlgorithmConfig, PpoConfig, TisConfig
from agentrl.process.interfaces import own_address
from agentrl.process.local_place import LocalPlace
from agentrl.process.place import Role
from agentrl.process.ports import LOOPBACK
from agentrl.process.remote import ChildProcess
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.testing.pumped_place import PumpedPlaces
from agentrl.trainer.config import OptimizerConfig, TrainerConfig, TrainerDeadlines
from agentrl.trainer.handle import TrainerHandle
from agentrl.trainer.rank import RankSpec
from agentrl.types.batch import StepReport, TrainBatch, TrainEpisode, TrainTrajectory
from agentrl.types.errors import ConfigError, TrainerError
from agentrl.types.trajectory import build_trajectories
from agentrl.types.version import PolicyVersion

Weights = dict[str, torch.Tensor]
FIRST = PolicyVersion(0, 0)
ELSEWHERE = "192.0.2.200"  # nobody has it: it is for documentation
OPTIMIZERS = {
    "adamw": OptimizerConfig(kind="adamw", learning_rate=1e-4, weight_decay=0.1),
    "sgd": OptimizerConfig(kind="sgd", learning_rate=0.1, max_grad_norm=0.5),
    "muon": OptimizerConfig(kind="muon", learning_rate=1e-3, rest_learning_rate=1e-4),
}
ALGORITHM = AlgorithmConfig(correction=TisConfig(level="turn"))
NARROW = PpoConfig(clip_low=0.002, clip_high=0.003)
# Each with one optimizer step a batch, and one with six, some of which have nothing to learn.
SETTINGS = {
    **{kind: (optimizer, ALGORITHM) for kind, optimizer in OPTIMIZERS.items()},
    "minibatches": (
        OptimizerConfig(kind="sgd", learning_rate=0.1, max_grad_norm=0.5),
        ALGORITHM.model_copy(update={"loss": NARROW, "minibatches": 3, "epochs": 2}),
    ),
}


def config_of(kind: str) -> TrainerConfig:
    # The behaviour log-probabilities of these batches are made up; the gate has tests of its own.
    return TrainerConfig(optimizer=SETTINGS[kind][0], micro_batch_tokens=24, max_gap_nats=3.0)


def arguments_of(kind: str) -> tuple[dict, dict]:
    return config_of(kind).model_dump(), SETTINGS[kind][1].model_dump()


def batch_of(step: int, *groups: tuple[float, ...]) -> TrainBatch:
    """Episodes of one to three replies of various lengths, sampled at about uniform."""
    rng = np.random.default_rng(step)
    episodes = []
    for group, rewards in enumerate(groups):
        for reward in rewards:
            replies = [(int(rng.integers(1, 7)), 0) for _ in range(int(rng.integers(1, 4)))]
            (built,) = build_trajectories(build_episode(build_ticket(), replies))
            ids = rng.integers(0, 300, len(built.token_ids)).astype(np.int32)
            logprobs = np.where(built.sampled, -5.7 + 0.3 * rng.standard_normal(len(ids)), 0).astype(np.float32)
            trajectory = dataclasses.replace(built, token_ids=ids, logprobs=logprobs)
            trained = TrainTrajectory(trajectory, built.sampled, np.zeros(len(ids), np.int32))
            episodes.append(TrainEpisode(f"e{len(episodes)}", group, reward, (trained,)))
    return TrainBatch("main", PolicyVersion(0, step), tuple(episodes))


def with_foreign_answer(batch: TrainBatch) -> TrainBatch:
    """The batch whose first episode has tokens that the engine was sure of and the trainer is not."""
    (trained,) = batch.episodes[0].trajectories
    logprobs = np.where(trained.loss_mask, -0.01, 0).astype(np.float32)
    foreign = dataclasses.replace(trained, trajectory=dataclasses.replace(trained.trajectory, logprobs=logprobs))
    first = dataclasses.replace(batch.episodes[0], trajectories=(foreign,))
    return dataclasses.replace(batch, episodes=(first, *batch.episodes[1:]))


# The second batch has one sequence to learn from: a second rank has nothing to do.
BATCHES = [
    batch_of(0, (1.0, 0.0, 0.0, 0.5), (0.0, 1.0)),
    batch_of(1, (1.0,), (0.3, 0.3)),
    with_foreign_answer(batch_of(2, (1.0, 0.0, 0.0, 0.5), (0.0, 1.0))),
]
BATCHES[1] = dataclasses.replace(
    BATCHES[1],
    episodes=(*BATCHES[1].episodes, dataclasses.replace(BATCHES[1].episodes[0], reward=0.0, trajectories=())),
)


def spec_of(model: Path, rank: int, num_ranks: int, folder: Path) -> RankSpec:
    return RankSpec(
        policy="main",
        model=str(model),
        version=FIRST,
        rank=rank,
        num_ranks=num_ranks,
        rendezvous=str(folder / f"rendezvous-{num_ranks}"),
        temperature=1.0,
        trainer=config_of("adamw").model_dump(),
        algorithm=ALGORITHM.model_dump(),
    )


@dataclass
class Day:
    """What two ranks did, by optimizer."""

    reports: dict[str, list[StepReport]] = field(default_factory=dict)
    weights: dict[str, Weights] = field(default_factory=dict)
    masked: dict[str, Weights] = field(default_factory=dict)
    continued: dict[str, Weights] = field(default_factory=dict)
    checkpoints: dict[str, Path] = field(default_factory=dict)
    error: BaseException | None = None
    alive: list[bool] = field(default_factory=list)


async def become(ranks: list[ChildProcess], kind: str) -> None:
    await asyncio.gather(
        *(r.call("become", *arguments_of(kind), None, result=type(None), deadline_s=200) for r in ranks)
    )


async def step_of_restored(handle: TrainerHandle, ranks: list[ChildProcess], kind: str, checkpoint: Path) -> None:
    """The second step again, from the checkpoint behind the first."""
    await become(ranks, kind)
    await handle.restore(checkpoint)
    await handle.step(dataclasses.replace(BATCHES[1], version=FIRST))


async def live(model: Path, folder: Path) -> Day:
    ranks = []
    for rank in range(2):
        argv = [trainer_worker.__file__, msgspec.json.encode(spec_of(model, rank, 2, folder)).decode()]
        ranks.append(await ChildProcess.start(f"trainer-main-{rank}", argv, folder / f"{rank}.log"))
    handle, day = TrainerHandle("main", config_of("adamw"), ranks, folder / "rendezvous-2"), Day()
    try:
        await asyncio.gather(*(rank.call("load", result=dict[str, int], deadline_s=200) for rank in ranks))
        for kind in SETTINGS:
            await become(ranks, kind)
            day.checkpoints[kind] = folder / f"{kind}-checkpoint"
            day.reports[kind] = [await handle.step(BATCHES[0])]
            await handle.save(day.checkpoints[kind])
            day.reports[kind].append(await handle.step(BATCHES[1]))
            manifest = await handle.stage(PolicyVersion(0, 2), folder / kind)
            day.weights[kind] = load_file(Path(manifest.path) / "model.safetensors")
            day.reports[kind].append(await handle.step(BATCHES[2]))
            manifest = await handle.stage(PolicyVersion(0, 3), folder / f"{kind}-masked")
            day.masked[kind] = load_file(Path(manifest.path) / "model.safetensors")
            await step_of_restored(handle, ranks, kind, day.checkpoints[kind])
            manifest = await handle.stage(PolicyVersion(0, 1), folder / f"{kind}-continued")
            day.continued[kind] = load_file(Path(manifest.path) / "model.safetensors")
        os.kill(ranks[1].pid, signal.SIGSTOP)  # the step cannot end before the kill
        step = asyncio.create_task(handle.step(dataclasses.replace(BATCHES[0], version=PolicyVersion(0, 1))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        os.kill(ranks[1].pid, signal.SIGKILL)
        (day.error,) = await asyncio.gather(step, return_exceptions=True)
        day.alive = [rank.is_alive for rank in ranks]
    finally:
        await handle.close()
    return day


@pytest.fixture(scope="module")
def day(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Day:
    return asyncio.run(live(tiny_model, tmp_path_factory.mktemp("ranks")))


@pytest.fixture(scope="module")
def single(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChangingRank]:
    """The only rank of a trainer, in this process."""
    rank = ChangingRank(spec_of(tiny_model, 0, 1, tmp_path_factory.mktemp("single")))
    rank.load()
    yield rank
    dist.destroy_process_group()


def weights_of(rank: ChangingRank, version: PolicyVersion, folder: Path) -> Weights:
    return load_file(Path(rank.stage(version, str(folder)).path) / "model.safetensors")


def assert_close(mine: Weights, other: Weights) -> None:
    assert mine.keys() == other.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], other[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", SETTINGS)
def test_two_ranks_compute_the_losses_and_weights_of_one(kind, day, single, tiny_model, tmp_path):
    single.become(*arguments_of(kind))
    for batch, theirs in zip(BATCHES, day.reports[kind], strict=True):
        if batch is BATCHES[2]:
            assert_close(day.weights[kind], weights_of(single, PolicyVersion(0, 2), tmp_path / "weights"))
        mine = single.step(batch)
        assert theirs.version == mine.version
        names = [name for name in mine.metrics if not name.startswith("time/") and not name.endswith("_per_s")]
        assert len(names) > 8
        assert mine.metrics["trainer/mismatched_sequences"] == (batch is BATCHES[2])
        for name in names:
            assert theirs.metrics[name] == pytest.approx(mine.metrics[name], rel=1e-4, abs=1e-5), name
    weights = weights_of(single, PolicyVersion(0, 3), tmp_path / "masked")
    assert_close(day.masked[kind], weights)
    start = load_file(tiny_model / "model.safetensors")
    assert max(float((weights[name] - start[name]).abs().max()) for name in weights) > 1e-4


def test_six_optimizer_steps_are_clipped_and_counted(day):
    first, second, third = (report.metrics for report in day.reports["minibatches"])
    assert [m["trainer/optimizer_steps"] + m["trainer/skipped_minibatches"] for m in (first, second, third)] == [6] * 3
    assert first["trainer/optimizer_steps"] == 6
    assert second["trainer/optimizer_steps"] == 2, "one episode to learn from, in two epochs"
    assert first["trainer/clipped_fraction"] > 0


@pytest.mark.parametrize("kind", SETTINGS)
def test_two_ranks_go_on_from_a_checkpoint_to_the_last_bit(kind, day):
    assert day.weights[kind].keys() == day.continued[kind].keys()
    assert all(torch.equal(tensor, day.continued[kind][name]) for name, tensor in day.weights[kind].items())


@pytest.mark.parametrize("kind", SETTINGS)
def test_one_rank_goes_on_from_the_checkpoint_of_two(kind, day, single, tmp_path):
    single.become(*arguments_of(kind))
    single.restore(str(day.checkpoints[kind]))
    single.step(dataclasses.replace(BATCHES[1], version=FIRST))
    assert_close(day.weights[kind], weights_of(single, PolicyVersion(0, 1), tmp_path / "weights"))


def test_a_rank_killed_in_a_step_ends_the_trainer_with_an_error_that_names_it(day):
    assert isinstance(day.error, TrainerError)
    assert "trainer of policy 'main': process trainer-main-1 ended (signal 9) during step" in str(day.error)
    assert day.alive == [False, False]


async def start(model: Path, logs: Path) -> TrainerHandle:
    return await TrainerHandle.start("main", model, FIRST, config_of("sgd"), ALGORITHM, 1.0, logs)


class SeenByOthers(LocalPlace):
    """This machine by the address at which others reach it, which is loopback's where it has no other."""

    @property
    def host(self) -> str:
        try:
            return own_address(ELSEWHERE)
        except OSError:
            return LOOPBACK


def listens_at(pid: int) -> set[str]:
    """IPv4 addresses at which a process listens."""
    files = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    packed = [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in files]
    return {str(ipaddress.ip_address(bytes.fromhex(address)[::-1])) for address in packed}


@pytest.mark.parametrize("kind", ["seen by others", "pumped"])
async def test_ranks_of_other_places_compute_the_same_to_the_last_bit(kind, day, tiny_model, tmp_path, monkeypatch):
    config = config_of("sgd").model_copy(update={"ranks": 2})
    places = [SeenByOthers()] * 2
    if kind == "pumped":
        places = await PumpedPlaces().gang(Role.TRAINER, ["one", "other"])
    else:
        monkeypatch.setattr("agentrl.trainer.handle.is_loopback", lambda host: False)
    handle = await TrainerHandle.start("main", tiny_model, FIRST, config, ALGORITHM, 1.0, tmp_path, places)
    try:
        if kind == "seen by others":
            assert not (tmp_path / "trainer-main.rendezvous").exists()
            assert listens_at(handle._ranks[1].pid) == {places[1].host}, "gloo is bound to the place's address"
        await handle.step(BATCHES[0])
        await handle.step(BATCHES[1])
        manifest = await handle.stage(PolicyVersion(0, 2), tmp_path / "weights")
        weights = load_file(Path(manifest.path) / "model.safetensors")
    finally:
        await handle.close()
        for place in places:
            await place.close()
    assert weights.keys() == day.weights["sgd"].keys()
    assert all(torch.equal(tensor, day.weights["sgd"][name]) for name, tensor in weights.items())


async def test_a_missing_model_folder_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no model at .*nowhere: config\.json is missing"):
        await start(tmp_path / "nowhere", tmp_path)


async def test_a_started_trainer_steps_until_a_call_fails_and_then_is_gone(tiny_model, tmp_path, single, monkeypatch):
    temporary, logs = tmp_path / "temporary", tmp_path / "logs"
    for folder in (temporary, logs):
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (logs / "trainer-main.rendezvous").write_bytes(b"of ranks that were killed")
    handle = await start(tiny_model, logs)
    assert not list(temporary.iterdir()), "a kill would leave it there"
    try:
        single.become(*arguments_of("sgd"))
        report = await handle.step(BATCHES[0])
        assert report.metrics["trainer/loss"] == pytest.approx(
            single.step(BATCHES[0]).metrics["trainer/loss"], abs=1e-6
        )
        with pytest.raises(TrainerError, match=r"policy 'main'.*step: ValueError: the batch is for version 0\.0"):
            await handle.step(BATCHES[0])
        with pytest.raises(TrainerError, match="policy 'main'"):
            await handle.step(BATCHES[1])
    finally:
        await handle.close()
    assert [path.name for path in logs.iterdir()] == ["trainer-main-0.log"]


async def test_a_trainer_that_is_too_slow_ends_with_an_error_that_names_the_limit(tiny_model, tmp_path):
    hasty = config_of("sgd").model_copy(update={"deadlines": TrainerDeadlines(start_s=0.01)})
    with pytest.raises(
        TrainerError, match=r"policy 'main': load took longer than 0\.01 s; see .*trainer\.deadlines\.start_s"
    ):
        await TrainerHandle.start("main", tiny_model, FIRST, hasty, ALGORITHM, 1.0, tmp_path)
