from __future__ import annotations

from dataclasses import replace

import pytest
from buffer_states import at, frontier_of, make_buffer
from ledger_lines import dropped, trained

from agentrl import codec
from agentrl.buffer.config import BufferConfig
from agentrl.buffer.frontier import FrontierState
from agentrl.buffer.ledger import Ledger, read_ledger
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.types.episode import StopReason
from agentrl.types.errors import Boundary, ConfigError, Failure

CRASH = Failure(Boundary.ENVIRONMENT, "crashed", "gone")


def test_goodput_says_where_sampled_tokens_went():
    ledger = Ledger([].append)
    ledger.trained(build_episode(build_ticket("a"), [(4, 0), (4, 0)]), trained_tokens=6, trained_by={"main": 1})
    ledger.dropped(build_episode(build_ticket("b"), [(2, 0)]), "no_spread", 1)
    assert ledger.goodput() == {
        "goodput/dropped_no_spread_fraction": 0.2,
        "goodput/masked_stale_fraction": 0.2,
        "goodput/trained_fraction": 0.6,
    }
    assert ledger.episodes == {"trained": 1, "dropped_no_spread": 1}


def test_tokens_that_were_sampled_again_are_counted_beside_those_that_came():
    ledger = Ledger((lines := []).append)
    episode = build_episode(build_ticket("a"), [(4, 0), (4, 0)])
    turns = tuple(replace(turn, regenerated_tokens=turn.index + 1) for turn in episode.turns)
    ledger.trained(replace(episode, turns=turns), trained_tokens=8, trained_by={"main": 1})
    assert (lines[0].sampled_tokens, lines[0].regenerated_tokens) == (8, 3)
    assert ledger.tokens == {"trained": 8, "masked_stale": 0, "regenerated": 3}


def test_a_ledger_of_a_version_that_did_not_count_them_can_be_read(tmp_path):
    line = codec.to_json(trained(0)).replace(b',"regenerated_tokens":0', b"")
    assert b"regenerated" not in line
    (tmp_path / "ledger.jsonl").write_bytes(line + b"\n")
    assert read_ledger(tmp_path / "ledger.jsonl") == [trained(0)]


def test_a_line_says_what_became_of_an_episode():
    lines = []
    episode = replace(build_episode(build_ticket("a", group=4, member=2), [(4, 0), (3, 0)], 0.5), seconds=1.23456)
    turns = tuple(replace(turn, environment_s=0.5 + turn.index) for turn in episode.turns)
    episode = replace(episode, turns=turns, stop_reason=StopReason.MAX_TURNS)
    Ledger(lines.append).trained(episode, trained_tokens=4, trained_by={"main": 9})
    [line] = lines
    assert (line.episode_id, line.task, line.outcome, line.reason) == ("a", "fake/train/4", "trained", "")
    assert (line.group, line.member, line.attempt, line.stop, line.tool_s) == (4, 2, 0, "max_turns", 2.0)
    assert (line.turns, line.sampled_tokens, line.trained_tokens, line.masked_tokens) == (2, 7, 4, 3)
    assert (line.reward, line.seconds, line.step) == (0.5, 1.2346, 9)


def test_an_episode_of_which_nothing_is_known_is_written_off_once():
    ledger = Ledger((lines := []).append)
    for name in ("a", "b"):
        ledger.dispatched(build_ticket(name))
    ledger.trained(build_episode(build_ticket("a"), [(1, 0)]), 1, {"main": 1})
    ledger.write_off("run_ended", 1, {})
    ledger.write_off("run_ended", 1, {})
    assert [(line.episode_id, line.outcome, line.sampled_tokens, line.stop) for line in lines] == [
        ("a", "trained", 1, "answered"),
        ("b", "dropped", 0, ""),
    ]


def test_a_ledger_is_read_as_it_was_written_but_for_a_line_that_a_crash_cut_off(tmp_path):
    lines = [trained(0), dropped(1, reward=None)]
    text = b"\n".join(codec.to_json(line) for line in lines)
    (tmp_path / "ledger.jsonl").write_bytes(text + b"\n" + text[:40])
    assert read_ledger(tmp_path / "ledger.jsonl") == lines


def test_a_ledger_with_other_columns_names_file_line_and_column(tmp_path):
    (tmp_path / "ledger.jsonl").write_text('{"episode_id": "a", "task": "b"}\n')
    with pytest.raises(ConfigError, match=r"ledger\.jsonl, line 1: .*`group`; another version"):
        read_ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(ConfigError, match=r"no .*nothing\.jsonl"):
        read_ledger(tmp_path / "nothing.jsonl")


async def test_whatever_state_an_episode_is_in_at_the_end_it_has_one_line():
    buffer = make_buffer(BufferConfig(group_size=2, groups_per_step=1, max_staleness=4), lines := [])
    tickets = [await buffer.admit() for _ in range(10)]
    taken, ready, half = tickets[0:2], tickets[4:6], tickets[6]
    for ticket in (*taken, *tickets[2:4], *ready, half):
        await buffer.settle(build_episode(ticket, [(2, 0)]))
    await buffer.take(*at(0))
    await buffer.trained(*at(1))
    await buffer.take(*at(1))
    await buffer.settle(replace(build_episode(tickets[8], [(1, 0)], None), failure=CRASH))
    await buffer.release(tickets[9])
    unsettled = {ticket.episode_id for ticket in buffer.unsettled()}
    assert unsettled == {tickets[7].episode_id, tickets[9].episode_id}, "played, and neither settled nor failed"
    cut_off = build_episode(tickets[7], [(1, 0)], None)
    buffer.close({cut_off.episode_id: cut_off})
    buffer.close({})
    await buffer.settle(cut_off)
    ends = {line.episode_id: (line.outcome, line.reason) for line in lines}
    assert len(lines) == len(tickets)
    sampled = {line.episode_id: line.sampled_tokens for line in lines}
    assert [sampled[ticket.episode_id] for ticket in tickets[7:]] == [1, 1, 0], "what is known of each counts"
    assert [ends[t.episode_id] for t in taken] == [("trained", "")] * 2
    assert ends.pop(tickets[8].episode_id) == ("dropped", "environment_crashed")
    assert [end for end in ends.values() if end[0] == "dropped"] == [("dropped", "run_ended")] * 7
    assert frontier_of(buffer, 1) == FrontierState(1)
