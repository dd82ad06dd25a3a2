"""A fork is played from its parent's record: same tokens, same state of the environment, then its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dying_worker import DyingWriter, Place
from rollout_parts import ANSWER, CALL, in_turn, nothing

from agentrl.envs.definition import EnvironmentDefinition
from agentrl.journal.entries import EnvironmentStarted, Judging, PartialReply, Scored
from agentrl.journal.forking import has_pinned, pinned_entries
from agentrl.journal.history import EpisodeHistory, build_history
from agentrl.journal.holder import pack_entries
from agentrl.testing.builders import build_ticket
from agentrl.testing.durable_environments import enduring, snapshotting
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.sole_holder import SoleHolder
from agentrl.types.episode import Episode, Fork, Node, Ticket
from agentrl.types.errors import StorageError
from agentrl.types.message import Message

PARENT = build_ticket("train-000000-0")
OTHER = replace(CALL, tool_calls=(replace(CALL.tool_calls[0], arguments={"sql": "select max from name"}),))
REPLAYED = replace(enduring, restore=None, reattach=None)
"""The same answers from every fresh instance, and nothing else to have its state again by."""


async def play(
    place: Place, chat: Any, ticket: Ticket, replies: Sequence[Message], history: EpisodeHistory | None = None
) -> tuple[Episode, DyingWriter]:
    writer = DyingWriter()
    histories = {ticket.episode_id: history} if history else None
    async with place.host() as host:
        journal = SoleHolder(writer, 1 if history is None else history.token + 1, histories)
        runner = place.runner(chat, host, journal, ScriptedEngine(chat, in_turn(*replies)))
        return await runner.run(runner.open(ticket), nothing), writer


async def forked(
    place: Place, chat: Any, turn: int, member: int, *replies: Message
) -> tuple[Episode, Episode, EpisodeHistory]:
    """A parent of two calls and an answer, and a fork of it that says `replies` where it draws its own."""
    parent, written = await play(place, chat, PARENT, (CALL, CALL, ANSWER))
    history = build_history(written.entries)
    assert history is not None
    ticket = replace(build_ticket(f"train-000000-{member}", member=member), fork=Fork(PARENT.episode_id, turn, 0))
    pinned = build_history(pinned_entries(history, ticket, token=7))
    assert pinned is not None
    episode, _ = await play(place, chat, ticket, replies, pinned)
    return parent, episode, pinned


def tokens(nodes: Sequence[Node]) -> list[Any]:
    """All of some nodes that a trainer sees."""
    return [
        (n.index, n.parent, n.turn, n.token_ids.tolist(), n.sample and (n.sample.logprobs.tolist(), n.sample.versions))
        for n in nodes
    ]


@pytest.mark.parametrize("definition", [snapshotting, REPLAYED, enduring], ids=["restored", "replayed", "with handle"])
@pytest.mark.parametrize("turn", [0, 1])
async def test_a_fork_has_its_parents_tokens_and_state_and_then_its_own(
    chat: Any, tmp_path: Path, definition: EnvironmentDefinition, turn: int
) -> None:
    place = Place(tmp_path, definition)
    parent, episode, _ = await forked(place, chat, turn, 3, *[OTHER] * 3, ANSWER)
    assert episode.failure is None
    last = parent.turns[turn].reply_node
    assert tokens(episode.nodes[: last + 1]) == tokens(parent.nodes[: last + 1])
    own = [effect for t in episode.turns[turn + 1 :] for effect in t.effects]
    assert all(effect.call.arguments == {"sql": "select max from name"} for effect in own)
    assert episode.num_pinned_tokens == sum(len(n.token_ids) for n in parent.nodes[: last + 1] if n.sample)
    # An instance that no fork has to do with, given the same calls one after the other.
    alone, _ = await play(
        Place(make(tmp_path / "alone"), definition), chat, PARENT, (*[CALL] * (turn + 1), OTHER, OTHER, ANSWER)
    )
    number = len(own)
    assert number == 2 - turn
    expected = [effect.result for t in alone.turns for effect in t.effects][: turn + 1 + number]
    assert [effect.result for t in episode.turns for effect in t.effects] == expected
    assert episode.metrics == {"steps": float(len(expected) + 1)}


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def test_forks_of_a_live_session_have_sessions_of_their_own(chat: Any, tmp_path: Path) -> None:
    place = Place(tmp_path, enduring)
    _, first, pinned = await forked(place, chat, 0, 2, CALL, OTHER, ANSWER)
    second, _ = await play(
        place, chat, replace(first.ticket, episode_id="train-000000-3"), (CALL, CALL, CALL, ANSWER), renamed(pinned)
    )
    assert (first.reward, second.reward) == (1.0, 1.0)
    assert place.server.begun() == ["session-1", "session-2", "session-3"]
    assert place.server.alive() == []


def renamed(pinned: EpisodeHistory) -> EpisodeHistory:
    history = build_history(
        [
            replace(e, ticket=replace(e.ticket, episode_id="train-000000-3")) if hasattr(e, "ticket") else e
            for e in pinned.entries
        ]
    )
    assert history is not None
    return history


async def test_what_is_pinned_holds_neither_a_session_nor_a_verdict_and_names_the_fork(
    chat: Any, tmp_path: Path
) -> None:
    _, _, pinned = await forked(Place(tmp_path, enduring), chat, 1, 3, CALL, CALL, ANSWER)
    assert pinned.session is None
    assert not [e for e in pinned.entries if isinstance(e, Judging | Scored | PartialReply)]
    assert [e.handle for e in pinned.entries if isinstance(e, EnvironmentStarted)] == [None]
    assert {entry.token for entry in pinned.entries} == {7}
    assert [turned.turn.index for turned in pinned.turns] == [0, 1]
    assert sorted(pinned.acted) == [0, 1]
    assert pinned.ticket.fork == Fork(PARENT.episode_id, 1, 0)
    assert pinned.num_sampled_tokens == 0, "none of it is its own"


async def test_a_state_that_is_not_on_record_is_named(chat: Any, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"what is on record of train-000000-0 does not reach the state .*turn=7"):
        await forked(Place(tmp_path, snapshotting), chat, 7, 3, ANSWER)


async def test_a_copy_counts_as_whole_once_a_worker_has_taken_it_over(chat: Any, tmp_path: Path) -> None:
    place = Place(tmp_path, snapshotting)
    _, episode, pinned = await forked(place, chat, 0, 3, CALL, ANSWER)
    assert not has_pinned(())
    assert not has_pinned(pack_entries(episode.episode_id, pinned.entries))
    _, writer = await play(place, chat, episode.ticket, (CALL, ANSWER), pinned)
    assert has_pinned(pack_entries(episode.episode_id, [*pinned.entries, *writer.entries]))


class Gambler:
    """A scaffold whose chance decides what it says to the policy."""

    async def run(self, context: Any) -> None:
        opening = await context.start()
        messages = opening.messages
        while True:
            said = replace(messages[-1], content=f"{messages[-1].content} {context.random.random()}")
            reply = await context.generate((*messages[:-1], said), opening.tools)
            result = await context.step(reply)
            if result.is_done:
                return
            messages = result.messages


async def test_a_scaffolds_chance_goes_on_from_its_parents(chat: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("dying_worker.ToolCalling", Gambler)
    parent, episode, _ = await forked(Place(tmp_path, snapshotting), chat, 0, 3, CALL, OTHER, ANSWER)
    assert episode.ticket.seed != PARENT.seed
    assert episode.failure is None, "it would ask otherwise than is on record, and be refused as nondeterministic"
    assert episode.nodes[2].token_ids.tolist() == parent.nodes[2].token_ids.tolist()
