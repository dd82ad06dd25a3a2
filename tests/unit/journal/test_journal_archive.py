from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from agentrl import codec
from agentrl.journal import archive as archive_module
from agentrl.journal import entries as e
from agentrl.journal.archive import Archived
from agentrl.journal.archive_file import archived_steps, check_file, read_step
from agentrl.journal.archive_names import archive_files
from agentrl.journal.disk import Disk
from agentrl.journal.history import build_history
from agentrl.types.environment import Score, ScoreRecord
from agentrl.types.episode import Node, StopReason
from agentrl.types.errors import Boundary, Failure, StorageError
from agentrl.types.generation import KeptTokens, RoutedExperts
from agentrl.types.version import PolicyVersion, VersionSpan
from tests.unit.journal.journals import Journal, archive_now, dropped, name_of, read_archived, taken, whole_life


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Episodes 0 and 1 trained for good, 2 dropped for good, 3 taken but not covered, 4 in play."""
    journal = Journal(tmp_path / "journal")
    for number in range(5):
        journal.play(number, whole_life(number)[: 3 if number > 3 else None])
    journal.note(taken(0, 1, 0), dropped(0, 2), e.Checkpointed({"main": 1}), taken(1, 3))
    return journal


def only_file(target: Path, pattern: str) -> Path:
    (file,) = target.glob(f"{pattern}.parquet")
    return file


def rows(target: Path) -> list[dict]:
    return [row for path in archive_files(target) for row in pq.read_table(path).to_pylist()]


def test_what_is_final_is_archived_in_the_order_in_which_it_was_consumed(journal: Journal, tmp_path: Path) -> None:
    done = archive_now(journal.folder, tmp_path / "episodes")
    assert done == Archived(only_file(tmp_path / "episodes", "consumed-000001-????????????????-000001"), episodes=3)
    found = [(r["episode_id"], r["outcome"], r["reason"], r["step"]) for r in rows(tmp_path / "episodes")]
    trained = [(name_of(number), "trained", None, 1) for number in (1, 0)]
    assert found == [*trained, (name_of(2), "dropped", "stale", 0)]


def test_what_one_policy_trained_and_another_left_out_has_the_step_that_trained_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.play(0, whole_life(0))
    both = ("main", "other")
    journal.note(taken(4, 0, policy="main", policies=both), e.LeftOut("other", 0, (name_of(0),), "no_spread", both))
    journal.note(e.Checkpointed({"main": 5, "other": 1}))
    archive_now(journal.folder, tmp_path / "episodes")
    assert [(row["outcome"], row["step"]) for row in rows(tmp_path / "episodes")] == [("trained", 5)]


def test_columns_say_what_the_episode_says(journal: Journal, tmp_path: Path) -> None:
    archive_now(journal.folder, tmp_path / "episodes")
    row, episode = rows(tmp_path / "episodes")[0], build_history(whole_life(1)).episode()
    ticket = episode.ticket
    names = ("episode_id", "task_id", "group", "member", "attempt", "seed")
    assert [row[n] for n in names] == [ticket.episode_id, ticket.task.id, 0, 1, 0, ticket.seed]
    assert (json.loads(row["started_at"]), json.loads(row["metrics"])) == ({"main": "0.0"}, {"queries": 2.0})
    assert (row["stop_reason"], row["failure"], row["reward"], row["seconds"]) == ("answered", None, 1 / 8, 3.5)
    assert (row["turns"], row["sampled_tokens"]) == (2, 6)
    assert row["token_ids"] == [5, 6, 1, 7, 8, 5, 6, 1, 7, 9]
    assert row["sampled"] == 2 * [False, False, True, True, True]
    assert row["turn"] == 5 * [0] + 5 * [1]
    assert row["logprobs"] == 2 * [None, None, *np.linspace(-0.1, -0.9, 3, dtype=np.float32).tolist()]
    spans = [(2, 5), (7, 10)]
    assert row["versions"] == [{"epoch": 0, "step": 3, "start": start, "end": end} for start, end in spans]


def _rich(number: int) -> list[e.EpisodeEntry]:
    """An episode with everything that a record may hold, failed, its reply of two versions."""
    life = whole_life(number, turns=1)
    turned = life[2]
    context, reply = turned.nodes
    spans = (VersionSpan(PolicyVersion(0, 3), 0, 1), VersionSpan(PolicyVersion(1, 4), 1, 3))
    kept = KeptTokens.from_lists([[1, 2], [7], [8, 9]])
    routed = RoutedExperts.narrow(0, np.arange(16).reshape(4, 2, 2))
    sample = replace(reply.sample, versions=spans, kept_tokens=kept, routed_experts=routed)
    life[2] = replace(turned, nodes=(context, replace(reply, sample=sample)))
    open_node = Node(2, 1, "agent", 1, np.zeros(0, np.int32), is_open=True)
    failure = Failure(Boundary.TIMEOUT, "environment.step", "no result within 5.0 s")
    return [*life[:-2], e.Ended(1, None, failure, 0.1 + 0.2, (open_node,))]


def test_an_episode_comes_back_to_the_bit(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    lives = {0: whole_life(0), 1: _rich(1), 2: whole_life(2, turns=0)}
    for number, life in lives.items():
        journal.play(number, life)
    journal.note(taken(0, 0, 1, 2), e.Checkpointed({"main": 1}))
    file = archive_now(journal.folder, tmp_path / "episodes").file
    assert file is not None
    for number, life in lives.items():
        episode = build_history(life).episode()
        assert codec.encode(read_archived(file, name_of(number))) == codec.encode(episode)
    assert rows(tmp_path / "episodes")[1]["failure"] == "timeout(environment.step): no result within 5.0 s"
    assert rows(tmp_path / "episodes")[2]["token_ids"] == []


def test_what_a_step_trained_comes_back_in_the_order_of_its_batch(journal: Journal, tmp_path: Path) -> None:
    file = archive_now(journal.folder, tmp_path / "episodes").file
    assert archived_steps(tmp_path / "episodes") == {1: file}
    expected = [build_history(whole_life(number)).episode() for number in (1, 0)]
    assert [codec.encode(episode) for episode in read_step(file, 1)] == [codec.encode(e) for e in expected]


def test_a_score_that_came_behind_the_end_is_archived(journal: Journal, tmp_path: Path) -> None:
    judged = e.Scored(e.NO_HOLDER, ScoreRecord("judge", Score(0.5)))
    journal.play(5, [*whole_life(5), judged])
    journal.note(taken(1, 5), e.Checkpointed({"main": 2}))
    file = archive_now(journal.folder, tmp_path / "episodes").file
    assert file is not None
    *_, episode = read_step(file, 2)
    assert (episode.episode_id, episode.reward) == (name_of(5), 5 / 8 + 0.5)


def test_nothing_is_archived_twice(journal: Journal, tmp_path: Path) -> None:
    target = tmp_path / "episodes"
    archive_now(journal.folder, target)
    assert archive_now(journal.folder, target) == Archived()
    journal.note(e.Checkpointed({"main": 2}))
    done = archive_now(journal.folder, target)
    assert (done.file, done.episodes) == (only_file(target, "consumed-000002-????????????????-000002"), 1)
    assert [row["episode_id"] for row in rows(target)] == [name_of(n) for n in (1, 0, 2, 3)]


def test_what_made_an_episode_final_first_stands(journal: Journal, tmp_path: Path) -> None:
    archive_now(journal.folder, tmp_path / "episodes")
    journal.note(dropped(1, 0), e.Checkpointed({"main": 1}))
    assert archive_now(journal.folder, tmp_path / "episodes").episodes == 0


def test_a_crash_before_the_file_is_in_place_leaves_everything_to_be_archived(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "episodes"

    def crash(_disk: Disk, draft: Path) -> None:
        draft.write_bytes(draft.read_bytes()[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(Disk, "sync_path", crash)
    with pytest.raises(KeyboardInterrupt):
        archive_now(journal.folder, target)
    monkeypatch.undo()
    assert (archive_files(target), len(list(target.iterdir()))) == ([], 1)
    assert pq.ParquetDataset(target).read().num_rows == 0, "a tool that reads the folder meets the draft"
    assert archive_now(journal.folder, target).episodes == 3
    assert list(target.iterdir()) == archive_files(target)


def test_after_going_back_to_an_older_checkpoint_files_follow_one_another(journal: Journal, tmp_path: Path) -> None:
    target = tmp_path / "episodes"
    journal.note(e.Checkpointed({"main": 5}))
    archive_now(journal.folder, target)
    journal.play(6, whole_life(6))
    journal.note(taken(1, 6), e.Checkpointed({"main": 2}))
    assert archive_now(journal.folder, target).episodes == 1
    journal.play(7, whole_life(7))
    journal.note(taken(4, 7), e.Checkpointed({"main": 5}))
    assert archive_now(journal.folder, target).episodes == 1
    assert [path.stem.split("-")[1::2] for path in archive_files(target)] == [
        ["000005", "000001"],
        ["000002", "000002"],
        ["000005", "000003"],
    ]


def test_beyond_its_bytes_the_oldest_files_go_and_the_newest_stays(journal: Journal, tmp_path: Path) -> None:
    target = tmp_path / "episodes"
    sizes = []
    for step in range(2, 5):
        done = archive_now(journal.folder, target)
        assert done.file is not None
        sizes.append(done.file.stat().st_size)
        journal.play(4 + step, whole_life(4 + step))
        journal.note(taken(step - 1, 4 + step), e.Checkpointed({"main": step}))
    done = archive_now(journal.folder, target, keep_bytes=sizes[-1] + sizes[-2])
    assert (done.episodes, done.deleted_files, done.deleted_bytes) == (1, 2, sizes[0] + sizes[1])
    done = archive_now(journal.folder, target, keep_bytes=0)
    assert (done.episodes, done.deleted_files, len(archive_files(target))) == (0, 1, 1)


def test_an_episode_whose_first_entries_are_gone_is_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal, target = Journal(tmp_path / "journal"), tmp_path / "episodes"
    lease, *rest = (replace(entry, token=2) for entry in whole_life(0))
    journal.play(0, whole_life(0)[:3])
    journal.rotate("worker")
    journal.play(0, [replace(lease, taken_over=3), *rest[2:]])
    journal.play(1, whole_life(1))
    journal.note(taken(0, 0, 1), e.Checkpointed({"main": 1}))
    (journal.folder / "worker-00000001.journal").unlink()
    done = archive_now(journal.folder, target)
    assert (done.episodes, done.incomplete) == (1, 1)
    assert [row["episode_id"] for row in rows(target)] == [name_of(1)]
    assert f"1 consumed episodes are not in {target}" in caplog.text


def test_an_archive_of_another_journal_is_refused(journal: Journal, tmp_path: Path) -> None:
    other = Journal(tmp_path / "other")
    other.play(0, whole_life(0))
    other.note(taken(0, 0), e.Checkpointed({"main": 1}))
    archive_now(other.folder, tmp_path / "episodes")
    with pytest.raises(StorageError, match="is not of the journal"):
        archive_now(journal.folder, tmp_path / "episodes")


def test_a_file_that_is_no_archive_is_named(journal: Journal, tmp_path: Path) -> None:
    target = tmp_path / "episodes"
    target.mkdir()
    (target / "consumed-000009-000009.parquet").write_bytes(b"scribble")
    with pytest.raises(StorageError, match="is no archive of episodes"):
        archive_now(journal.folder, target)


def test_no_byte_of_an_archive_can_be_another_without_an_error_that_names_the_file(
    journal: Journal, tmp_path: Path
) -> None:
    file = archive_now(journal.folder, tmp_path / "episodes").file
    assert file is not None
    data = file.read_bytes()
    for place in range(0, len(data), 97):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(StorageError, match=f"{file} is damaged: .*restore the file from a copy"):
            check_file(file)
    file.write_bytes(data)
    check_file(file)


def test_pages_of_an_archive_have_checksums_by_which_any_reader_finds_damage(journal: Journal, tmp_path: Path) -> None:
    file = archive_now(journal.folder, tmp_path / "episodes").file
    assert file is not None
    row_group = pq.ParquetFile(file).metadata.row_group(0)
    column = row_group.column(row_group.num_columns - 1)
    assert column.path_in_schema == "record"
    data = bytearray(file.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 20] ^= 1
    file.write_bytes(data)
    with pytest.raises(OSError, match="CRC checksum verification failed"):
        pq.read_table(file, columns=["record"], page_checksum_verification=True)


def test_an_archive_of_an_older_program_without_checksums_is_read_as_a_whole(journal: Journal, tmp_path: Path) -> None:
    file = archive_now(journal.folder, tmp_path / "episodes").file
    assert file is not None
    old = file.with_name("consumed-000001-000001.parquet")
    pq.write_table(pq.read_table(file), old)
    check_file(old)
    assert [episode.episode_id for episode in read_step(old, 1)] == [name_of(1), name_of(0)]
    old.write_bytes(old.read_bytes()[:-9])
    with pytest.raises(StorageError, match=f"{old} cannot be read: .*restore the file from a copy"):
        check_file(old)


def test_row_groups_are_bounded(journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "_ROW_GROUP_TOKENS", 20)
    file = archive_now(journal.folder, tmp_path / "episodes").file
    assert pq.ParquetFile(file).num_row_groups == 2
    assert read_archived(file, name_of(2)).episode_id == name_of(2)
    assert read_archived(file, name_of(2)).stop_reason is StopReason.ANSWERED
