from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from agentrl.journal import entries as e
from agentrl.journal.claim import Claim
from agentrl.journal.history import build_history
from agentrl.journal.reading import read_journal
from agentrl.journal.writer import JournalWriter
from agentrl.types.environment import Opening, Score, ScoreRecord, StepResult
from agentrl.types.episode import Agent, Effect, Node, SampledColumns, StopReason, Ticket, Turn
from agentrl.types.errors import ConfigError, StorageError
from agentrl.types.generation import FinishReason, Generation
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Split, Task
from agentrl.types.turn_score import TurnKey, TurnScore, token_digest
from agentrl.types.version import PolicyVersion, VersionSpan

V = PolicyVersion(0, 3)
TICKET = Ticket("train-000007-0", Task("fake", Split.TRAIN, 7), 7, 0, 0, 99, {"main": V})
CALL = ToolCall("train-000007-0/0.0", "count", {"n": 1})


def leased(token: int, taken_over: int = 0) -> e.Leased:
    return e.Leased(TICKET, (Agent("agent", "main"),), token, taken_over)


def turned(token: int, index: int, reply: list[int]) -> e.TurnCommitted:
    spans = (VersionSpan(V, 0, len(reply)),)
    sample = SampledColumns(np.full(len(reply), -0.5, np.float32), spans, spans)
    prompt = Node(2 * index, None, "agent", index, np.array([5, 6], np.int32))
    node = Node(2 * index + 1, 2 * index, "agent", index, np.array(reply, np.int32), sample)
    return e.TurnCommitted(token, Turn(index, "agent", node.index), (prompt, node), FinishReason.STOP, f"digest{index}")


def delivered(token: int, ids: list[int], request: str = "digest1") -> e.PartialReply:
    spans = (VersionSpan(V, 0, len(ids)),)
    ids_array = np.array(ids, np.int32)
    return e.PartialReply(
        token, Generation(ids_array, np.zeros(len(ids), np.float32), spans, spans, FinishReason.ABORT), request
    )


def resulted(token: int, turn: int) -> e.StepResultRecorded:
    result = StepResult((Message(Role.TOOL, "1", tool_call_id=CALL.id),))
    return e.StepResultRecorded(token, turn, (Effect(CALL.id, CALL, "1", 0.1),), result, 0.1)


async def written(folder: Path, *pieces: tuple[str | None, e.Entry]) -> None:
    writer = JournalWriter(folder, "worker")
    for episode, entry in pieces:
        await writer.append(*e.pack(episode, entry))
    await writer.close()


def test_a_life_is_what_its_entries_say() -> None:
    intended = e.Intended(1, 0, (Effect(CALL.id, CALL),))
    opened = e.EnvironmentStarted(1, Opening((Message(Role.USER, "count"),)))
    life = build_history([leased(1), opened, turned(1, 0, [7, 8]), intended])
    assert life is not None
    assert life.pending == intended
    assert life.num_sampled_tokens == 2
    more = [*life.entries, resulted(1, 0), delivered(1, [9, 10, 11])]
    life = build_history(more)
    assert life is not None
    assert (life.pending, life.num_sampled_tokens) == (None, 5)
    assert life.episode().turns[0].effects[0].result == "1"
    life = build_history([*more, turned(1, 1, [9, 10, 11, 12])])
    assert life is not None
    assert (life.parts, life.num_sampled_tokens) == ([], 6)


def test_a_turn_completes_its_own_open_reply_and_leaves_the_others_open() -> None:
    entries = [leased(1), turned(1, 0, [7]), delivered(1, [9], "a"), delivered(1, [5, 6], "digest1")]
    life = build_history([*entries, delivered(1, [10], "a"), turned(1, 1, [5, 6, 8])])
    assert life is not None
    assert life.num_sampled_tokens == 1 + 3 + 2
    nodes = life.episode().nodes
    assert [(node.token_ids.tolist(), node.is_open) for node in nodes[-2:]] == [([5, 6, 8], False), ([9, 10], True)]


def test_what_a_holder_wrote_after_it_lost_its_lease_counts_for_nothing() -> None:
    old = [leased(1), turned(1, 0, [7])]
    late = turned(1, 1, [666])
    life = build_history([*old, late, leased(2, taken_over=2), turned(2, 1, [8])])
    assert life is not None
    assert [t.nodes[-1].token_ids.tolist() for t in life.turns] == [[7], [8]]
    assert life.fenced == 1
    in_other_file = build_history([leased(2, taken_over=2), turned(2, 1, [8]), *old, late])
    assert in_other_file is not None
    assert in_other_file.fenced == 1


def test_a_score_behind_the_end_counts_wherever_it_is_found() -> None:
    ended = [leased(1), turned(1, 0, [7]), e.Ended(1, StopReason.ANSWERED, None, 3.5)]
    judged = e.Scored(e.NO_HOLDER, ScoreRecord("judge", Score(0.25)))
    for entries in ([*ended, judged], [judged, *ended]):
        life = build_history(entries)
        assert life is not None
        assert (life.entries, life.fenced, life.is_whole) == ([*ended, judged], 0, True)
        assert life.episode().reward == 0.25
    torn = build_history([judged, leased(2, taken_over=2), turned(2, 0, [7])])
    assert torn is not None
    assert not torn.is_whole, "the score does not stand for an entry that is lost"


async def test_a_journal_reads_as_it_was_written(tmp_path: Path) -> None:
    ended = e.Ended(1, StopReason.ANSWERED, None, 3.5)
    taken = e.Taken("main", V, ((7, (TICKET.episode_id,)),))
    await written(tmp_path, (TICKET.episode_id, leased(1)), (TICKET.episode_id, turned(1, 0, [7, 8])))
    scored = e.Scored(1, ScoreRecord("verifier", Score(1.0)))
    await written(
        tmp_path,
        (TICKET.episode_id, scored),
        (TICKET.episode_id, ended),
        (None, taken),
        (None, e.Checkpointed({"main": 4})),
    )
    state = read_journal(tmp_path)
    episode = state.lives[TICKET.episode_id].episode()
    assert (episode.reward, episode.stop_reason, episode.num_sampled_tokens) == (1.0, StopReason.ANSWERED, 2)
    assert episode.ticket == TICKET
    assert (state.taken, state.checkpointed, state.torn_tails) == ([taken], {"main": 4}, {})


def test_an_entry_of_a_newer_schema_is_refused_by_name() -> None:
    schema, kind, payload = e.pack(None, e.Checkpointed({"main": 4}))
    with pytest.raises(StorageError, match=f"schema {schema + 1}; this program knows schemas up to {schema}"):
        e.unpack(schema + 1, kind, payload)


def test_an_entry_of_an_older_schema_is_brought_up(monkeypatch: pytest.MonkeyPatch) -> None:
    schema, kind, payload = e.pack(None, e.Checkpointed({"main": 4}))
    monkeypatch.setattr(e, "SCHEMA", schema + 1)
    monkeypatch.setitem(e.MIGRATIONS, (schema, kind), lambda fields: {"steps": {"other": fields["steps"]["main"]}})
    assert e.unpack(schema, kind, payload) == e.Checkpointed({"other": 4})


def test_an_entry_of_a_schema_that_is_read_no_more_names_what_is_to_be_done() -> None:
    _, kind, payload = e.pack(None, e.Checkpointed({"main": 4}))
    with pytest.raises(StorageError, match="is of schema 1, and this program reads 2 to 2: resume the run with the ve"):
        e.unpack(1, kind, payload)


def test_a_claim_replaces_the_one_before_it_which_then_may_not_write(tmp_path: Path) -> None:
    first = Claim.take(tmp_path / "journal")
    first.check()
    second = Claim.take(tmp_path / "journal")
    assert (first.token, second.token) == (1, 2)
    second.check()
    with pytest.raises(StorageError, match="another process has taken over"):
        first.check()


async def test_a_journal_of_a_living_process_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from agentrl.journal.claim import Claim; "
        "Claim.take(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    holder = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(tmp_path / "journal"), **pipes)
    assert holder.stdout is not None
    await asyncio.wait_for(holder.stdout.readline(), 30)
    with pytest.raises(ConfigError, match=f"in use by process {holder.pid}"):
        Claim.take(tmp_path / "journal")
    holder.kill()
    await holder.wait()
    assert Claim.take(tmp_path / "journal").token == 2


def of_turn(turn: int, ids: list[int], value: float) -> e.TurnScored:
    """What a scorer said of a turn while it was played; the tier writes it, and holds no lease."""
    key = TurnKey(TICKET.episode_id, "agent", turn, token_digest(np.array(ids, np.int32)))
    return e.TurnScored(e.NO_HOLDER, "prm", TurnScore(key, "prm:1", value))


def test_scores_of_turns_between_two_holders_are_neither_counted_nor_cut_off() -> None:
    """The first holder wrote 3 entries, of which the second found 2: it took over before the second turn arrived."""
    opening, lost, drawn = [5, 6, 7, 8], [5, 6, 9], [5, 6, 10, 11]
    held = [leased(1), turned(1, 0, [7, 8]), of_turn(0, opening, 0.5), turned(1, 1, [9]), of_turn(1, lost, 0.9)]
    life = build_history([*held, leased(2, taken_over=2), turned(2, 1, [10, 11]), of_turn(1, drawn, 0.25)])
    assert life is not None
    assert life.is_whole
    assert life.fenced == 1
    assert [turn.nodes[-1].token_ids.tolist() for turn in life.turns] == [[7, 8], [10, 11]]
    assert len(life.turn_scores["prm"]) == 3, "all that was said of the episode's turns stays on record"
    scores = life.episode().turn_scores["prm"]
    assert [(score.key.turn, score.value) for score in scores] == [(0, 0.5), (1, 0.25)]


def test_the_first_score_of_a_turn_stands_and_each_scorer_has_its_own() -> None:
    once, twice = of_turn(0, [5, 6, 7], 0.5), of_turn(0, [5, 6, 7], 0.75)
    other = e.TurnScored(e.NO_HOLDER, "judge", of_turn(0, [5, 6, 7], 3.0).score)
    life = build_history([leased(1), turned(1, 0, [7]), once, twice, other])
    assert life is not None
    found = {name: [score.value for score in scores] for name, scores in life.episode().turn_scores.items()}
    assert found == {"prm": [0.5], "judge": [3.0]}
