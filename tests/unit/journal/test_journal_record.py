from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import codec
from agentrl.journal import entries as e
from agentrl.journal.archive_file import episode_of, record_of
from agentrl.journal.frames import Frame
from agentrl.journal.history import build_history
from agentrl.types.environment import StepResult
from agentrl.types.episode import Effect, Episode
from agentrl.types.errors import StorageError
from agentrl.types.generation import FinishReason, Generation
from agentrl.types.message import ToolCall
from agentrl.types.version import PolicyVersion, VersionSpan
from tests.unit.journal.journals import (
    Journal,
    archive_now,
    dropped,
    name_of,
    read_archived,
    taken,
    turned,
    whole_life,
)

EFFECT = Effect("0-0", ToolCall("call-0", "query", {"sql": "SELECT 1"}))


def _held_by(token: int, entries: list[e.EpisodeEntry]) -> list[e.EpisodeEntry]:
    return [replace(entry, token=token) for entry in entries]


@st.composite
def lives(draw: st.DrawFn) -> list[e.EpisodeEntry]:
    """An episode that a second worker took over, at any entry, while the first may have gone on."""
    done = (replace(EFFECT, result="1", seconds=0.5),)
    act = [e.Intended(1, 0, (EFFECT,)), e.StepResultRecorded(1, 0, done, StepResult((), False), 0.75)]
    ticket, opened, first, second, verdict, end = whole_life(0)
    whole = [ticket, opened, first, *act, second, verdict, end]
    taken_over = draw(st.integers(1, len(whole)))
    late = whole[: draw(st.integers(taken_over, len(whole)))]
    goes_on = draw(st.integers(taken_over, len(whole)))
    second_lease = replace(ticket, token=2, taken_over=taken_over)
    return [*late, second_lease, *_held_by(2, whole[taken_over:goes_on])]


def _archived(entries: list[e.EpisodeEntry]) -> tuple[dict, Episode]:
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal")
        journal.play(0, entries)
        journal.note(taken(0, 0), e.Checkpointed({"main": 1}))
        file = archive_now(journal.folder, Path(folder) / "episodes").file
        assert file is not None
        return pq.read_table(file).to_pylist()[0], read_archived(file, name_of(0))


@given(lives())
def test_what_counts_of_an_episode_is_archived_to_the_bit_and_nothing_else(entries: list[e.EpisodeEntry]) -> None:
    row, archived = _archived(entries)
    life = build_history(entries)
    assert life is not None
    episode = life.episode()
    assert codec.encode(archived) == codec.encode(episode)
    tokens = [token for node in episode.nodes for token in node.token_ids.tolist()]
    assert (row["turns"], row["token_ids"]) == (len(episode.turns), tokens)
    assert (row["reward"], row["stop_reason"]) == (episode.reward, episode.stop_reason)
    assert row["sampled_tokens"] == episode.num_sampled_tokens == sum(row["sampled"])


@pytest.mark.parametrize("end", [0, 1, 2])
def test_the_parts_of_an_open_reply_are_archived_and_those_of_a_whole_one_are_not_twice(
    end: int, tmp_path: Path
) -> None:
    """Cut off behind the first part, behind the second, and behind the turn that the two became."""
    lease, opened, first, *_ = whole_life(0)
    life = [lease, opened, first, *(_part(ids) for ids in ([21, 22], [23])), turned(1, [21, 22, 23, 24])]
    journal = Journal(tmp_path / "journal")
    journal.play(0, life[: 4 + end])
    journal.note(dropped(0, 0), e.Checkpointed({"main": 1}))
    file = archive_now(journal.folder, tmp_path / "episodes").file
    assert file is not None
    (row,) = pq.read_table(file).to_pylist()
    reply = ([21, 22], [21, 22, 23], [21, 22, 23, 24])[end]
    assert row["token_ids"][-len(reply) :] == reply
    assert row["sampled_tokens"] == 3 + len(reply)
    archived, played = read_archived(file, name_of(0)), build_history(life[: 4 + end]).episode()
    assert codec.encode(archived) == codec.encode(played)


def _part(ids: list[int]) -> e.PartialReply:
    spans = (VersionSpan(PolicyVersion(0, 3), 0, len(ids)),)
    logprobs = np.full(len(ids), -0.5, np.float32)
    generation = Generation(np.array(ids, np.int32), logprobs, spans, spans, FinishReason.ABORT)
    return e.PartialReply(1, generation, "digest1", "agent")


def _frame(entry: e.EpisodeEntry, schema: int = e.SCHEMA, body: bytes | None = None) -> Frame:
    _, kind, payload = e.pack(name_of(0), entry)
    return Frame(schema, kind, payload if body is None else payload[:8] + body, 0, 0)


def test_entries_of_an_older_schema_are_migrated_where_they_are_archived(monkeypatch: pytest.MonkeyPatch) -> None:
    *begin, end = whole_life(0, turns=1)
    fields = msgspec.msgpack.decode(codec.encode(end))
    fields["ms"] = fields.pop("seconds") * 1000
    older = _frame(end, e.SCHEMA, msgspec.msgpack.encode(fields))
    migration = lambda fields: {"seconds": fields.pop("ms") / 1000, **fields}  # noqa: E731
    monkeypatch.setitem(e.MIGRATIONS, (e.SCHEMA, e.NUMBERS[e.Ended]), migration)
    monkeypatch.setattr(e, "SCHEMA", e.SCHEMA + 1)
    frames = [*(_frame(entry, e.SCHEMA) for entry in begin), older]
    assert episode_of(record_of(frames)).seconds == end.seconds


def test_a_record_of_a_newer_program_or_of_none_is_named() -> None:
    lease = whole_life(0)[0]
    with pytest.raises(StorageError, match="install the version that wrote it"):
        episode_of(record_of([_frame(lease, e.SCHEMA + 1)]))
    with pytest.raises(StorageError, match="ends within a header"):
        episode_of(record_of([_frame(lease)]) + b"more")
    with pytest.raises(StorageError, match="has no lease"):
        episode_of(record_of([_frame(turned(0, [7]))]))


def test_arrays_of_another_type_are_what_they_say(tmp_path: Path) -> None:
    first, second = turned(0, [7, 8]), turned(1, [9])
    wide = replace(second.nodes[1], token_ids=second.nodes[1].token_ids.astype("int64"))
    lease, opened, *_, end = whole_life(0)
    row, _ = _archived([lease, opened, first, replace(second, nodes=(second.nodes[0], wide)), end])
    assert row["token_ids"] == [5, 6, 7, 8, 5, 6, 9]
