from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.journal import entries as e
from agentrl.journal.archive_names import archive_files
from agentrl.journal.compaction import compact
from agentrl.journal.index import JournalIndex, open_journal
from agentrl.journal.reading import read_journal
from tests.unit.journal.journals import (
    DyingDisk,
    Journal,
    archive_and_compact,
    archive_now,
    dropped,
    name_of,
    taken,
    whole_life,
)

WRITERS = st.sampled_from(["one", "two", "buffer"])
OPERATIONS = st.one_of(
    st.tuples(st.just("play"), WRITERS, st.integers(1, 3)),
    st.tuples(st.just("finish"), WRITERS),
    st.tuples(st.just("take"), st.integers(1, 3)),
    st.tuples(st.just("drop"), st.integers(1, 3)),
    st.tuples(st.just("checkpoint")),
    st.tuples(st.just("rotate"), WRITERS),
    st.tuples(st.just("start anew"), st.integers(1, 3)),
    st.tuples(st.just("archive")),
    st.tuples(st.just("compact"), st.sampled_from([0, 1, 2, 3, 1000])),
)


class Run:
    """A run as a model: which episodes are in play, wait, and are final, and what each operation does to them."""

    def __init__(self, folder: Path) -> None:
        self.journal, self.target = Journal(folder / "journal"), folder / "episodes"
        self.step = self.played = 0
        self.begun: list[tuple[int, list[e.EpisodeEntry]]] = []
        self.waiting: list[int] = []
        self.consumed: list[int] = []
        self.final: list[int] = []

    @property
    def unfinished(self) -> set[str]:
        return {name_of(n) for n in (*(n for n, _ in self.begun), *self.waiting, *self.consumed)}

    def apply(self, operation: tuple) -> None:
        match operation:
            case "play", writer, count:
                life = whole_life(self.played, turns=1)
                self.journal.play(self.played, life[:count], writer)
                self.begun.append((self.played, life[count:]))
                self.played += 1
            case "finish", writer if self.begun:
                number, rest = self.begun.pop(0)
                self.journal.play(number, _taken_over(number, rest), writer)
                self.waiting.append(number)
            case "take" | "drop", count if self.waiting:
                self._consume(operation[0] == "take", count)
            case ("checkpoint",):
                self.journal.note(e.Checkpointed({"main": self.step}))
                self.final, self.consumed = self.final + self.consumed, []
            case "rotate", writer:
                self.journal.rotate(writer)
            case ("archive",):
                archive_now(self.journal.folder, self.target)
            case "compact", calls:
                archive_now(self.journal.folder, self.target)
                with suppress(KeyboardInterrupt):
                    compact(JournalIndex(self.journal.folder), 1, DyingDisk(calls))
            case "start anew", count:
                for other in [("take", count), ("checkpoint",), *(("rotate", name) for name in ("one", "buffer"))]:
                    self.apply(other)

    def _consume(self, is_taken: bool, count: int) -> None:
        chosen, self.waiting = self.waiting[:count], self.waiting[count:]
        self.journal.note((taken if is_taken else dropped)(self.step, *chosen))
        self.step += is_taken
        self.consumed += chosen


@settings(max_examples=200)
@given(st.lists(OPERATIONS, max_size=40))
def test_whatever_is_compacted_when_no_episode_is_lost_or_archived_twice(operations: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name))
        for operation in operations:
            run.apply(operation)
            lives = read_journal(run.journal.folder).lives
            assert set(open_journal(run.journal.folder).lives) == run.unfinished <= lives.keys()
            assert all(life.is_whole for name, life in lives.items() if name in run.unfinished)
        archive_and_compact(run.journal.folder, run.target)
        lives = open_journal(run.journal.folder).lives
        assert {name: len(life.entries) for name, life in lives.items()} == _lengths(run)
        files = archive_files(run.target)
        archived = [name for file in files for name in pq.read_table(file).column("episode_id").to_pylist()]
        assert archived == [name_of(number) for number in run.final]


def _lengths(run: Run) -> dict[str, int]:
    """Entries that each unfinished episode has, by the model."""
    begun = {name_of(number): len(whole_life(number, turns=1)) - len(rest) for number, rest in run.begun}
    lease_and_rest = len(whole_life(0, turns=1)) + 1
    return {**begun, **{name_of(number): lease_and_rest for number in (*run.waiting, *run.consumed)}}


def _taken_over(number: int, rest: list[e.EpisodeEntry]) -> list[e.EpisodeEntry]:
    """The rest of a life as another holder writes it."""
    life = whole_life(number, turns=1)
    return [replace(entry, token=2) for entry in (replace(life[0], taken_over=len(life) - len(rest)), *rest)]
