"""Scorers in processes of their own, real ones: what they answer, and what becomes of them when they die or hang."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from agentrl.process.local_place import LocalPlaces
from agentrl.process.place import Places
from agentrl.scorers.definition import ScorerSetting
from agentrl.scoring.queue import ScorerQueue
from agentrl.scoring.workers import ProcessWorker, worker_start
from agentrl.testing.pumped_place import PumpedPlaces
from agentrl.types.errors import Boundary, ConfigError
from tests.unit.scoring.process_scorers import ANSWERS_NONSENSE, DIES, HANGS, RAISES, MoodyConfig
from tests.unit.scoring.scoring_parts import Line, a_turn, until

pytestmark = pytest.mark.timeout(300)


class ProcessLine(Line):
    """The line of a scorer in processes, which count the turns that they see."""

    def __init__(self, folder: Path, places: Places | None = None, **config: Any) -> None:
        self.file = folder / "seen"
        self.config = MoodyConfig(name="moody", count_file=self.file, **{"batch_turns": 1, **config})
        self.kept = []
        start = worker_start(self.config, ScorerSetting({"main": Path("/model")}), folder, places or LocalPlaces())
        self.queue = ScorerQueue(self.config, start, self._keep)

    def seen(self) -> list[tuple[int, int]]:
        """Process and number of each turn that a process saw."""
        lines = self.file.read_text().splitlines() if self.file.is_file() else []
        return [(int(pid), int(turn)) for pid, turn in map(str.split, lines)]


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").is_dir() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]


async def test_a_process_scores_with_what_it_may_know_of_the_run(tmp_path: Path) -> None:
    line = ProcessLine(tmp_path)
    async with line.running() as queue:
        score = await queue.ask(a_turn(0))
    assert (score.key, score.value, score.prior, score.version) == (a_turn(0).key, 0.004, 0.002, "/model")
    [(pid, turn)] = line.seen()
    assert turn == 0
    assert pid != os.getpid()
    assert not is_there(pid)


@pytest.mark.parametrize(
    ("number", "boundary", "kind", "says"),
    [(DIES, Boundary.SCORER, "died", "signal 9"), (HANGS, Boundary.TIMEOUT, "scorer.moody", "not done within 2 s")],
)
async def test_a_process_that_dies_or_hangs_fails_its_batch_and_is_replaced(
    number: int, boundary: Boundary, kind: str, says: str, tmp_path: Path
) -> None:
    line = ProcessLine(tmp_path, call_s=2.0 if number == HANGS else 60.0, pool={"queue_s": 0.1})
    async with line.running() as queue:
        [worker] = queue._pool._busy
        assert isinstance(worker, ProcessWorker)
        failed = await queue.ask(a_turn(number))
        assert failed.failure is not None
        assert says in failed.failure.message
        assert (failed.failure.boundary, failed.failure.kind) == (boundary, kind)
        await until(lambda: not is_there(worker._child.pid) and line.total("workers_started") == 2)
    assert line.total("workers_lost") == 1
    assert len(line.seen()) <= 1, "the turn is not sent again"


async def test_the_loss_of_a_place_fails_the_batch_and_another_takes_its_place(tmp_path: Path) -> None:
    places = PumpedPlaces()
    line = ProcessLine(tmp_path, places, pool={"queue_s": 0.1})
    async with line.running() as queue:
        assert (await queue.ask(a_turn(0))).value == 0.004
        asked = queue.ask(a_turn(HANGS))
        await until(lambda: len(line.seen()) == 2)
        places.taken["scorer-moody-1"].lose()
        failed = await asked
        assert failed.failure is not None
        assert (failed.failure.boundary, failed.failure.kind) == (Boundary.SCORER, "died")
        assert "scorer-moody-1 ended (its place is gone)" in failed.failure.message
        assert (await queue.ask(a_turn(1))).value == 0.005
    assert line.total("workers_lost") == 1
    assert list(places.taken) == ["scorer-moody-1", "scorer-moody-2"]
    assert all(place.is_closed for place in places.taken.values())


async def test_after_a_death_the_line_goes_on(tmp_path: Path) -> None:
    line = ProcessLine(tmp_path, pool={"queue_s": 0.1})
    async with line.running() as queue:
        asked = [queue.ask(a_turn(number)) for number in (0, DIES, 1)]
        first, failed, second = [await future for future in asked]
    assert (first.value, failed.failure is not None, second.value) == (0.004, True, 0.005)
    assert len({pid for pid, _ in line.seen()}) == 2


@pytest.mark.parametrize(("number", "says"), [(RAISES, "no verdict"), (ANSWERS_NONSENSE, "key")])
async def test_what_a_process_raises_or_answers_wrongly_is_said_of_its_batch(
    number: int, says: str, tmp_path: Path
) -> None:
    line = ProcessLine(tmp_path, pool={"queue_s": 0.1})
    async with line.running() as queue:
        failed = await queue.ask(a_turn(number))
        assert failed.failure is not None
        assert failed.failure.boundary is Boundary.SCORER
        assert says in failed.failure.message
        assert (await queue.ask(a_turn(0))).value == 0.004


async def test_a_scorer_that_cannot_be_built_is_bad_configuration(tmp_path: Path) -> None:
    line = ProcessLine(tmp_path, refuses=True)
    with pytest.raises(ConfigError, match="scorer 'moody': no model there"):
        await line.queue.open()
