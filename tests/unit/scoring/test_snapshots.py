"""The engine of a self-teacher: which versions it takes, when, and that no turn is scored across a swap."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from agentrl.inference.fleet import Fleet
from agentrl.scorers.definition import ScorerSetting
from agentrl.scorers.self_teacher import SelfTeacherConfig, SelfTeacherScorer
from agentrl.scoring.snapshots import SnapshotTeacher
from agentrl.types.batch import Receipt, WeightsManifest
from agentrl.types.errors import EngineError, StorageError
from agentrl.types.turn_score import check_turn_score
from agentrl.types.version import PolicyVersion
from tests.unit.scoring.scoring_parts import GENEROUS_S, a_turn, until

FIRST = PolicyVersion(0, 0)


def manifest(step: int) -> WeightsManifest:
    return WeightsManifest("main", PolicyVersion(0, step), f"/staged/0.{step}", {"a": f"digest {step}"}, 100)


class Teacher:
    """Engine and transport in one: every score is the step of the weights that it holds at that moment.

    Scores wait for `may_score`, what is read waits for `may_read`.
    """

    name = "engine-main-self"
    repeated_calls: Counter[str] = Counter()

    def __init__(self) -> None:
        self.held, self.calls, self.checksum = FIRST, list[str](), ""
        self.may_score, self.may_read = asyncio.Event(), asyncio.Event()
        self.may_score.set()
        self.may_read.set()
        self.being_scored = 0
        self.fault: Exception | None = None

    async def score(self, token_ids: Sequence[int], start: int = 1) -> list[float]:
        before = self.held
        self.being_scored += 1
        await self.may_score.wait()
        self.being_scored -= 1
        assert self.held == before, "the weights were swapped under a turn"
        return [-float(before.step)] * (len(token_ids) - start)

    async def prepare(self, engine: Teacher, manifest: WeightsManifest) -> None:
        self.calls.append(f"prepare {manifest.version}")
        await self.may_read.wait()
        if self.fault is not None:
            raise self.fault

    async def pause(self) -> int:
        self.calls.append("pause")
        return 0

    async def send(self, engine: Teacher, manifest: WeightsManifest) -> None:
        assert not self.being_scored
        self.calls.append(f"send {manifest.version}")
        self.held = manifest.version

    async def receipt(self) -> Receipt:
        return Receipt(self.name, self.held, {"a": self.checksum or f"digest {self.held.step}"}, 0.0, 0)

    async def resume(self) -> None:
        self.calls.append("resume")


def made(teacher: Teacher, **options: int) -> tuple[SnapshotTeacher, SelfTeacherScorer]:
    config = SelfTeacherConfig(name="self", policy="main", **options)
    snapshot = SnapshotTeacher(config, Fleet([teacher], FIRST), teacher)  # type: ignore[list-item, arg-type]
    return snapshot, SelfTeacherScorer(ScorerSetting({}, snapshots={"self": snapshot}), config)


@asynccontextmanager
async def teaching(teacher: Teacher, **options: int) -> AsyncIterator[tuple[SnapshotTeacher, SelfTeacherScorer]]:
    """The two at work."""
    snapshot, scorer = made(teacher, **options)
    task = asyncio.create_task(snapshot.run())
    try:
        async with asyncio.timeout(GENEROUS_S):
            yield snapshot, scorer
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


@pytest.mark.parametrize(
    ("interval", "lag", "taken"),
    [(1, 0, [1, 2, 3, 4, 5, 6, 7, 8]), (3, 0, [3, 6]), (3, 1, [3, 6]), (3, 4, [3]), (2, 5, [2]), (9, 0, [])],
)
async def test_versions_are_taken_by_interval_and_lag(interval: int, lag: int, taken: list[int]) -> None:
    """Kept are every `interval`-th of the steps 1 to 8; one is taken once step 8 or an earlier one is `lag` ahead."""
    teacher = Teacher()
    async with teaching(teacher, interval_steps=interval, lag_steps=lag) as (snapshot, _):
        seen = []
        for step in range(1, 9):
            snapshot.published(manifest(step))
            if step - lag in taken:
                await until(lambda step=step: snapshot.fleet.newest.step == step - lag)
            seen.append(snapshot.fleet.newest.step)
        sent = [call for call in teacher.calls if call.startswith("send")]
    assert sent == [f"send 0.{step}" for step in taken]
    assert seen == [max([s for s in taken if s + lag <= step], default=0) for step in range(1, 9)]


async def test_folders_stay_until_the_engine_has_read_them() -> None:
    teacher = Teacher()
    async with teaching(teacher, interval_steps=2, lag_steps=2) as (snapshot, _):
        for step in (1, 2, 3):
            snapshot.published(manifest(step))
        assert snapshot.pinned == {"/staged/0.2"}, "it waits until it is old enough"
        teacher.may_read.clear()
        snapshot.published(manifest(4))
        await until(lambda: "prepare 0.2" in teacher.calls)
        for step in (5, 6, 7, 8):
            snapshot.published(manifest(step))
        assert snapshot.pinned == {"/staged/0.2", "/staged/0.6", "/staged/0.8"}, "0.4 was due, and is by now outdated"
        teacher.may_read.set()
        await until(lambda: snapshot.fleet.newest.step == 6)
        await until(lambda: snapshot.pinned == {"/staged/0.8"})
    assert [call for call in teacher.calls if call.startswith("send")] == ["send 0.2", "send 0.6"]


async def test_no_turn_is_scored_across_a_swap_and_each_names_its_version() -> None:
    teacher = Teacher()
    async with teaching(teacher, interval_steps=1) as (snapshot, scorer):
        teacher.may_score.clear()
        early = asyncio.create_task(scorer.score([a_turn(0), a_turn(1)]))
        await until(lambda: teacher.being_scored == 2)
        snapshot.published(manifest(5))
        await until(lambda: snapshot._is_swapping)
        late = asyncio.create_task(scorer.score([a_turn(2)]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert (teacher.calls, teacher.being_scored) == ([], 2), "it swapped, or scored, while turns were scored"
        teacher.may_score.set()
        old, (new,) = await early, await late
    assert [score.version for score in (*old, new)] == ["self:0.0", "self:0.0", "self:0.5"]
    for turn, score, step in zip((a_turn(0), a_turn(1), a_turn(2)), (*old, new), (0, 0, 5), strict=True):
        checked = check_turn_score(turn, score)
        assert checked.logprobs is not None
        assert checked.logprobs.tolist() == [-step] * turn.num_reply_tokens
    assert teacher.calls == ["prepare 0.5", "pause", "send 0.5", "resume"]


async def test_a_turn_that_is_given_up_holds_up_no_swap() -> None:
    teacher = Teacher()
    async with teaching(teacher, interval_steps=1) as (snapshot, scorer):
        teacher.may_score.clear()
        asked = asyncio.create_task(scorer.score([a_turn(0)]))
        await until(lambda: teacher.being_scored == 1)
        snapshot.published(manifest(1))
        teacher.being_scored = 0  # the engine hears of the cancellation as well
        asked.cancel()
        await until(lambda: snapshot.fleet.newest.step == 1)


async def test_a_receipt_of_other_weights_names_scorer_and_version() -> None:
    teacher = Teacher()
    teacher.checksum = "something else"
    snapshot, _ = made(teacher, interval_steps=4)
    snapshot.published(manifest(4))
    with pytest.raises(EngineError, match=r"scorer 'self' cannot take version 0\.4: 1 of 1 tensors differ"):
        await asyncio.wait_for(snapshot.run(), GENEROUS_S)
    assert snapshot.fleet.newest == FIRST, "it is not said to teach what it has not shown"


@pytest.mark.parametrize("fault", [EngineError("gone"), StorageError("model.safetensors is cut short")])
async def test_weights_that_cannot_be_read_name_scorer_and_version(fault: Exception) -> None:
    teacher = Teacher()
    teacher.fault = fault
    snapshot, _ = made(teacher, interval_steps=4)
    snapshot.published(manifest(4))
    with pytest.raises(EngineError, match=rf"scorer 'self' cannot take version 0\.4: {fault}"):
        await asyncio.wait_for(snapshot.run(), GENEROUS_S)
