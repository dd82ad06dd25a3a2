"""Workers of a scorer: replaced when lost, more where turns wait, fewer where they are idle, ended whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from agentrl.scoring import pool as pool_module
from agentrl.testing.scorers import length_score
from agentrl.types.errors import Boundary, ConfigError, EpisodeError
from agentrl.types.turn_score import ScoredTurn, TurnScore
from tests.unit.scoring.scoring_parts import Line, a_turn, until


class Staff:
    """Starts workers that answer by length once they may; the first of them are lost in their first batch."""

    def __init__(self, num_lost: int = 0) -> None:
        self.workers: list[Worker] = []
        self.may_answer = asyncio.Event()
        self.num_lost = num_lost
        self.failures: list[Exception] = []

    async def start(self) -> Worker:
        if self.failures:
            raise self.failures.pop(0)
        worker = Worker(self, is_mortal=len(self.workers) < self.num_lost)
        self.workers.append(worker)
        return worker


class Worker:
    slots = 1

    def __init__(self, staff: Staff, is_mortal: bool) -> None:
        self._staff, self._is_mortal = staff, is_mortal
        self.is_lost = self.is_closed = False
        self.num_batches = 0

    async def score(self, turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        self.num_batches += 1
        if self._is_mortal:
            self.is_lost = True
            raise EpisodeError(Boundary.SCORER, "died", "signal 9")
        await self._staff.may_answer.wait()
        return [length_score(turn) for turn in turns]

    async def close(self) -> None:
        self.is_closed = True


async def test_a_lost_worker_is_replaced_and_used_no_more() -> None:
    staff = Staff(num_lost=1)
    staff.may_answer.set()
    line = Line(start=staff.start)
    async with line.running() as queue:
        lost = await queue.ask(a_turn(0))
        assert lost.failure is not None
        assert lost.failure.kind == "died"
        assert (await queue.ask(a_turn(1))).value == 0.005
    assert [worker.num_batches for worker in staff.workers] == [1, 1]
    assert all(worker.is_closed for worker in staff.workers)
    assert (line.total("workers_lost"), line.total("workers_started")) == (1, 2)


async def test_workers_come_while_turns_wait_up_to_the_bound_and_go_when_they_are_idle() -> None:
    staff = Staff()
    line = Line(start=staff.start, batch_turns=1, pool={"least": 1, "most": 3, "queue_s": 0.02})
    async with line.running() as queue:
        asked = [queue.ask(a_turn(number)) for number in range(8)]
        await until(lambda: line.queue.metrics()["scorer/len/workers"] == 3)
        await asyncio.sleep(0.2)  # several times what a turn may wait
        assert len(staff.workers) == 3, "no more than the bound"
        staff.may_answer.set()
        await asyncio.gather(*asked)
        await until(lambda: line.queue.metrics()["scorer/len/workers"] == 1)
    assert sum(worker.is_closed for worker in staff.workers) == 3


async def test_no_worker_comes_for_turns_that_do_not_wait() -> None:
    staff = Staff()
    staff.may_answer.set()
    line = Line(start=staff.start, pool={"least": 2, "most": 4, "queue_s": 100.0})
    async with line.running() as queue:
        for number in range(20):
            await queue.ask(a_turn(number))
    assert len(staff.workers) == 2


async def test_a_replacement_that_does_not_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_RETRY_S", 0.01)
    staff = Staff(num_lost=1)
    staff.may_answer.set()
    line = Line(start=staff.start, pool={"queue_s": 0.02})
    async with line.running() as queue:
        staff.failures = [EpisodeError(Boundary.SCORER, "died", "out of memory") for _ in range(2)]
        await queue.ask(a_turn(0))
        assert (await queue.ask(a_turn(1))).value == 0.005
    assert staff.failures == []


async def test_workers_that_started_are_ended_if_others_cannot() -> None:
    staff = Staff()
    line = Line(start=staff.start, pool={"least": 3, "most": 3})
    staff.failures = [ConfigError("no such model")]
    with pytest.raises(ConfigError, match="no such model"):
        await line.queue.open()
    assert [worker.is_closed for worker in staff.workers] == [True, True]


@pytest.mark.parametrize("how", ["raises", "hangs"])
async def test_a_worker_that_does_not_close_holds_nobody_up(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_CLOSE_S", 0.02)

    class Stubborn(Worker):
        async def close(self) -> None:
            self.is_closed = True
            if how == "raises":
                raise RuntimeError("cannot close")
            await asyncio.Event().wait()

    staff = Staff(num_lost=1)
    staff.may_answer.set()

    async def start() -> Worker:
        worker = Stubborn(staff, is_mortal=not staff.workers)
        staff.workers.append(worker)
        return worker

    line = Line(start=start)
    async with line.running() as queue:
        await queue.ask(a_turn(0))
        assert (await queue.ask(a_turn(1))).value == 0.005
    assert [worker.is_closed for worker in staff.workers] == [True, True]
