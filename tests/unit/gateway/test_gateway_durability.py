"""What is on record of a program's episode when its worker dies, and what becomes of the episode then."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from gateway_parts import ANSWER, CALL, play

from agentrl.gateway.starting import LazyGateway
from agentrl.journal.history import build_history
from agentrl.journal.reading import read_journal
from agentrl.journal.writer import JournalWriter
from agentrl.rollouts.episode_log import EpisodeParked
from agentrl.testing.builders import build_ticket
from agentrl.testing.scripted import AbortingEngine
from agentrl.testing.sole_holder import SoleHolder
from agentrl.testing.tiny import tiny_chat
from agentrl.types.episode import Episode
from agentrl.types.errors import CUT_OFF, Boundary
from agentrl.types.message import Role

NAME = build_ticket().episode_id


@pytest.fixture(scope="session")
def chat(tiny_model):
    return tiny_chat(tiny_model)


def script(session, messages):
    return CALL if messages[-1].role is not Role.TOOL else ANSWER


async def asked(access, number: int) -> httpx.Response:
    body = {"model": "agent", "messages": [{"role": "user", "content": f"question {number}"}]}
    async with httpx.AsyncClient(base_url=access.url, timeout=60) as http:
        headers = {"authorization": f"Bearer {access.key}"}
        return await http.post("/v1/chat/completions", json=body, headers=headers)


async def played(folder: Path, chat, agent, history=None, token: int = 1, engine=None) -> Episode:
    writer = JournalWriter(folder, "worker")
    journal = SoleHolder(writer, token, {NAME: history} if history is not None else None)
    try:
        return await play(chat, engine or AbortingEngine(chat, script, [3, 0, 2]), agent, journal=journal)
    finally:
        await writer.close()


async def test_a_reply_that_a_program_has_heard_is_durable(chat, tmp_path):
    durable = []

    async def agent(access):
        for number in range(3):
            await asked(access, number)
            life = read_journal(tmp_path).lives[NAME]
            durable.append((len(life.turns), life.num_sampled_tokens))

    episode = await played(tmp_path, chat, agent)
    sizes = [len(node.token_ids) for node in episode.nodes if node.sample is not None]
    assert durable == [(n + 1, sum(sizes[: n + 1])) for n in range(3)]
    recorded = read_journal(tmp_path).lives[NAME].episode()
    assert [node.token_ids.tolist() for node in recorded.nodes] == [n.token_ids.tolist() for n in episode.nodes]
    assert recorded.counts == episode.counts


async def test_calls_at_once_are_told_apart_on_record(chat, tmp_path):
    async def agent(access):
        await asyncio.gather(*(asked(access, number) for number in range(4)))

    episode = await played(tmp_path, chat, agent)
    recorded = read_journal(tmp_path).lives[NAME]
    assert recorded.parts == []
    assert [node.parent for node in recorded.episode().nodes] == [node.parent for node in episode.nodes]


async def test_an_episode_that_is_cut_off_behind_any_entry_of_its_program_is_never_played_on(chat, tmp_path):
    async def agent(access):
        for number in range(2):
            await asked(access, number)

    async def never(access):
        raise AssertionError("the program was run again")

    await played(tmp_path / "whole", chat, agent)
    entries, num_tried = read_journal(tmp_path / "whole").lives[NAME].entries, 0
    for length in range(2, len(entries) - 1):
        history = build_history(entries[:length])
        if history is None or history.pending is not None or history.results:
            continue  # behind its program: the environment decides whether the episode goes on
        resumed = await played(tmp_path / f"cut{length}", chat, never, history, token=2)
        assert resumed.failure is not None
        assert (resumed.failure.boundary, resumed.failure.kind) == (Boundary.SCAFFOLD, CUT_OFF)
        assert resumed.num_sampled_tokens == history.num_sampled_tokens
        num_tried += 1
    assert num_tried == 5, "the opening, a part, and the rest of two replies"


async def test_a_worker_that_is_to_stop_leaves_the_episode_at_its_next_call(chat, tmp_path):
    writer = JournalWriter(tmp_path, "worker")
    journal, gateway, answers = SoleHolder(writer), LazyGateway(), []

    async def agent(access):
        answers.append(await asked(access, 0))
        journal.park()
        answers.append(await asked(access, 1))

    with pytest.raises(EpisodeParked):
        await play(chat, AbortingEngine(chat, script, []), agent, gateway, journal=journal)
    await gateway.close()
    await writer.close()
    assert [answer.status_code for answer in answers] == [200, 401]
    assert len(read_journal(tmp_path).lives[NAME].turns) == 1
