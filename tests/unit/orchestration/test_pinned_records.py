"""What a fork has from its parent is on record before it is played, also after a kill that came in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.journal import entries as e
from agentrl.journal.claim import Claim
from agentrl.journal.forking import has_pinned
from agentrl.journal.history import build_history
from agentrl.journal.holder import pack_entries, unpack_history
from agentrl.journal.reading import read_journal
from agentrl.journal.writer import JournalWriter
from agentrl.orchestration.worker_journals import WorkerJournals
from agentrl.rollouts.durable import WorkerJournal
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.types.environment import Opening, StepResult
from agentrl.types.episode import Fork, StopReason
from agentrl.types.errors import StorageError
from agentrl.types.generation import FinishReason
from agentrl.types.message import Message, Role
from agentrl.types.rollout import Assignment

PARENT = build_ticket("train-000000-0")
FORK = replace(build_ticket("train-000000-3", member=3), fork=Fork(PARENT.episode_id, 1, 0))


@pytest.fixture
async def journals(tmp_path: Path) -> AsyncIterator[WorkerJournals]:
    claim = Claim.take(tmp_path / "journal")
    writer = JournalWriter(claim.folder, "worker-0", check_right=claim.check)
    found = WorkerJournals(claim, WorkerJournal(writer))
    yield found
    await writer.close()


async def play_parent(journals: WorkerJournals) -> None:
    """Three turns with an answer each, on record as a worker writes them."""
    assert journals.own is not None
    played = build_episode(PARENT, [(2, 0), (3, 0), (4, 0)])
    journals.own.assign(Assignment(PARENT, journals.next_token()))
    log = await journals.own.open(PARENT, played.agents)
    await log.opened(Opening((Message(Role.USER, "count"),)), None)
    for turn in played.turns:
        nodes = [node for node in played.nodes if node.turn == turn.index]
        await log.turned(
            replace(turn, aborts=2, regenerated_tokens=5), nodes, FinishReason.STOP, f"request {turn.index}"
        )
        await log.intended(())
        await log.resulted((), StepResult((Message(Role.USER, f"answer {turn.index}"),)), 0.5, b"%d" % turn.index)
    await log.ended(replace(played, stop_reason=StopReason.ANSWERED))


async def test_a_fork_is_on_record_up_to_its_state_before_anybody_plays_it(journals: WorkerJournals) -> None:
    await play_parent(journals)
    packed = await journals.pin(FORK)
    assert journals.claim is not None
    lives = read_journal(journals.claim.folder).lives
    parent, fork = lives[PARENT.episode_id], lives[FORK.episode_id]
    assert fork.ticket == FORK
    assert fork.ended is None
    assert fork.is_whole
    assert [t.nodes[-1].token_ids.tolist() for t in fork.turns] == [
        t.nodes[-1].token_ids.tolist() for t in parent.turns[:2]
    ]
    assert [t.turn.regenerated_tokens + t.turn.aborts for t in fork.turns] == [0, 0], "that counts for the parent"
    assert [result.snapshot for result in fork.results] == [b"0", b"1"]
    assert packed == pack_entries(FORK.episode_id, fork.entries)


async def test_all_forks_of_a_parent_get_the_same(journals: WorkerJournals) -> None:
    await play_parent(journals)
    tickets = [replace(FORK, episode_id=f"train-000000-{member}", member=member) for member in (2, 3, 4)]
    pinned = [unpack_history(entries) for entries in await asyncio.gather(*map(journals.pin, tickets))]
    contexts = [[t.request for t in history.turns] for history in pinned if history is not None]
    assert contexts == [["request 0", "request 1"]] * 3


async def test_a_copy_that_a_kill_cut_short_is_made_anew(journals: WorkerJournals) -> None:
    await play_parent(journals)
    packed = await journals.pin(FORK)
    whole = unpack_history(packed)
    assert whole is not None
    cut = packed[:-1]
    assert not has_pinned(cut)
    again = await journals.pin(FORK)
    history = build_history([e.unpack(*entry) for entry in (*cut, *again)])
    assert history is not None
    assert history.is_whole
    assert [type(entry) for entry in history.entries] == [type(entry) for entry in whole.entries]


async def test_a_parent_that_is_not_on_record_is_named(journals: WorkerJournals) -> None:
    with pytest.raises(StorageError, match="the journal lacks train-000000-0, from which forks are to go on"):
        await journals.pin(FORK)


async def test_without_a_journal_nothing_is_forked() -> None:
    with pytest.raises(StorageError, match="no journal is kept that could have its parent"):
        await WorkerJournals().pin(FORK)
