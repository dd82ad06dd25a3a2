"""What a worker that is gone has left of its episodes, wherever the journal keeps it by now."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.journal import entries as e
from agentrl.journal import holder
from agentrl.journal.history import EpisodeHistory
from agentrl.journal.holder import newest_segment, read_held, unpack_history
from tests.unit.journal.journals import Journal, archive_and_compact, name_of, taken, whole_life


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Episode n lies in the worker's segment n + 1; 0 to 2 are final, 3 and 4 are not."""
    journal = Journal(tmp_path / "journal")
    for number in range(5):
        journal.rotate("worker")
        journal.play(number, whole_life(number))
    journal.note(taken(0, 0, 1, 2), e.Checkpointed({"main": 1}))
    return journal


def history_of(journal: Journal, number: int, after: int = 0) -> EpisodeHistory | None:
    name = name_of(number)
    return unpack_history(read_held(journal.folder, "worker", after, {name: 1})[name])


def test_what_a_worker_held_is_found_behind_the_number_at_which_it_began(journal: Journal) -> None:
    before = history_of(journal, 3)
    assert before is not None
    assert before.ended is not None
    assert history_of(journal, 3, after=4) is None, "an earlier process of that name wrote it"
    assert newest_segment(journal.folder, "worker") == 5


def test_what_a_checkpoint_has_compacted_is_found_too(journal: Journal, tmp_path: Path) -> None:
    before = history_of(journal, 3)
    assert archive_and_compact(journal.folder, tmp_path / "episodes") > 0
    after = history_of(journal, 3)
    assert before is not None
    assert after is not None
    assert [type(entry) for entry in after.entries] == [type(entry) for entry in before.entries]


def test_segments_that_are_compacted_while_they_are_read_are_read_again(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the listing and the reading a checkpoint moves what the worker held."""
    original, calls = holder.read_segment, []

    def compacts_first(path: Path):
        if not calls:
            calls.append(path)
            archive_and_compact(journal.folder, tmp_path / "episodes")
        return original(path)

    monkeypatch.setattr(holder, "read_segment", compacts_first)
    found = history_of(journal, 3)
    assert found is not None
    assert found.ended is not None
    assert len(calls) == 1
