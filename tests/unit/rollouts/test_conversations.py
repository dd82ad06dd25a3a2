from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_parts import ANSWER, CALL, LIMITS, QUESTION, RESULT, TOOLS, in_turn

from agentrl.rollouts.conversations import Conversations
from agentrl.rollouts.episode_log import NoLog
from agentrl.rollouts.record import EpisodeRecord
from agentrl.rollouts.replies import ContextFullError, ReplySampler, TokensSpentError
from agentrl.testing.builders import build_ticket
from agentrl.testing.scripted import ScriptedEngine
from agentrl.types.episode import Agent
from agentrl.types.generation import FinishReason, Generation, Sampling
from agentrl.types.message import Message, Role, ToolSpec
from agentrl.types.program import ModelCall
from agentrl.types.trajectory import build_trajectories
from agentrl.types.version import VersionSpan

OTHER = Message(Role.USER, "and who are you?")
SYSTEM = Message(Role.SYSTEM, "You help.")


class InterruptedEngine(ScriptedEngine):
    """Delivers scripted replies in pieces of any size, with an abort and a newer version behind each."""

    def __init__(self, chat, script, seed: int | None = None) -> None:
        super().__init__(chat, script)
        self._random = random.Random(seed) if seed is not None else None
        self._begun: dict[bytes, int] = {}
        self.requests = []
        self.deliveries: dict[bytes, list[int]] = {}

    async def generate(self, request) -> Generation:
        self.requests.append(request)
        name = request.prompt_ids.tobytes()
        done = self._begun.pop(name, 0)
        whole = self._chat.complete(self._script(request.session, request.conversation))
        rest = whole[done:][: request.max_new_tokens]
        size = len(rest) if self._random is None else self._random.randint(0, len(rest))
        for _ in range(0 if self._random is None else self._random.randint(0, 3)):
            await asyncio.sleep(0)
        ids = rest[:size]
        asked = request.prompt_ids[: len(request.prompt_ids) - done].tobytes()
        self.deliveries.setdefault(asked, []).extend(ids.tolist())
        spans = (VersionSpan(self.version, 0, size),) if size else ()
        finish = FinishReason.STOP if int(rest[-1]) in request.stop_token_ids else FinishReason.LENGTH
        if size < len(rest):
            finish = FinishReason.ABORT
            self._begun[np.concatenate([request.prompt_ids, ids]).tobytes()] = done + size
            self.version = self.version.next()
        return Generation(ids, np.full(size, -0.25, np.float32), spans, spans, finish)


def make(chat, engine, limits=LIMITS):
    record = EpisodeRecord(build_ticket(), (Agent("agent", "main"),))
    log = NoLog()
    sampler = ReplySampler(record, "agent", engine, chat.stop_token_ids, Sampling(), limits, log)
    return record, Conversations(record, "agent", chat, sampler, log)


def verbatim(message: Message) -> Message:
    return message


async def ask(conversations, *messages: Message, tools=TOOLS, echo=verbatim, **fields):
    return await conversations.reply(ModelCall("agent", messages, tools, **fields), echo)


def branches(record) -> list[list[int]]:
    return [trajectory.token_ids.tolist() for trajectory in build_trajectories(record.close(0.0))]


async def test_a_conversation_that_goes_on_is_one_branch_of_exactly_the_delivered_tokens(chat):
    engine = InterruptedEngine(chat, in_turn(CALL, ANSWER))
    record, conversations = make(chat, engine)
    first = await ask(conversations, QUESTION)
    result = replace(RESULT, tool_call_id=first.message.tool_calls[0].id)
    second = await ask(conversations, QUESTION, first.message, result)
    assert second.message.content == ANSWER.content
    expected = [
        *chat.open([QUESTION], TOOLS),
        *chat.complete(CALL),
        *chat.extend(chat.open([QUESTION], TOOLS), chat.complete(CALL), [result], TOOLS, chat.open([QUESTION], TOOLS)),
        *chat.complete(ANSWER),
    ]
    assert branches(record) == [expected]
    assert [request.seed for request in engine.requests] == [engine.requests[0].seed] * 2


async def test_what_a_program_loses_of_a_reply_opens_no_branch(chat):
    """Rendered again, the reply without its white space would have other tokens than those that were drawn."""
    spoken = Message(Role.ASSISTANT, "\n\n  I will see.  ", CALL.tool_calls)
    record, conversations = make(chat, InterruptedEngine(chat, in_turn(spoken, ANSWER)))
    reply = await ask(conversations, QUESTION)
    sent_back = replace(reply.message, content="I will see.", reasoning=None)
    result = replace(RESULT, tool_call_id=sent_back.tool_calls[0].id)
    rendered = chat.open([QUESTION, sent_back, result], TOOLS)
    await ask(conversations, QUESTION, sent_back, result)
    (branch,) = branches(record)
    assert branch[: len(rendered)] != rendered.tolist()
    assert branch[len(chat.open([QUESTION], TOOLS)) :][: len(reply.token_ids)] == reply.token_ids.tolist()


async def test_an_edited_history_is_a_branch_that_shares_the_nodes_before_the_edit(chat):
    record, conversations = make(chat, InterruptedEngine(chat, in_turn(ANSWER)))
    await ask(conversations, QUESTION)
    edited = Message(Role.ASSISTANT, "something that was never said")
    reply = await ask(conversations, QUESTION, edited, OTHER)
    rendered = chat.open([QUESTION, edited, OTHER], TOOLS).tolist()
    one, two = branches(record)
    assert one == [*chat.open([QUESTION], TOOLS), *chat.complete(ANSWER)]
    assert two == [*rendered, *reply.token_ids.tolist()]
    # the prompt ends where the edited reply begins: that node is shared
    assert [node.parent for node in record.close(0.0).nodes] == [None, 0, 0, 2]


async def test_a_sub_agent_has_a_root_of_its_own(chat):
    record, conversations = make(chat, InterruptedEngine(chat, in_turn(CALL, ANSWER)))
    first = await ask(conversations, QUESTION)
    await ask(conversations, SYSTEM, OTHER, tools=())
    result = replace(RESULT, tool_call_id=first.message.tool_calls[0].id)
    await ask(conversations, QUESTION, first.message, result)
    nodes = record.close(0.0).nodes
    assert [node.parent for node in nodes] == [None, 0, None, 2, 1, 4]


async def test_other_tools_are_another_conversation(chat):
    record, conversations = make(chat, InterruptedEngine(chat, in_turn(ANSWER)))
    first = await ask(conversations, QUESTION)
    more = (*TOOLS, ToolSpec("count", "Count."))
    await ask(conversations, QUESTION, first.message, OTHER, tools=more)
    assert branches(record)[1][: len(chat.open([QUESTION, first.message, OTHER], more))] == (
        chat.open([QUESTION, first.message, OTHER], more).tolist()
    )


async def test_the_same_question_asked_twice_is_two_replies_to_one_prompt_by_chances_of_their_own(chat):
    engine = InterruptedEngine(chat, in_turn(ANSWER))
    record, conversations = make(chat, engine)
    await asyncio.gather(ask(conversations, QUESTION), ask(conversations, QUESTION))
    nodes = record.close(0.0).nodes
    assert [(node.parent, node.sample is not None) for node in nodes] == [(None, False), (0, True), (0, True)]
    assert engine.requests[0].seed != engine.requests[1].seed


async def test_ids_that_go_on_behind_known_ones_extend_them_and_messages_are_found_by_tokens(chat):
    record, conversations = make(chat, InterruptedEngine(chat, in_turn(ANSWER)))
    opening = chat.open([QUESTION], TOOLS)
    first = await conversations.reply(ModelCall("agent", prompt_ids=opening), verbatim)
    going_on = np.concatenate([opening, first.token_ids, np.asarray([11, 12, 13], np.int32)])
    await conversations.reply(ModelCall("agent", prompt_ids=going_on), verbatim)
    await ask(conversations, QUESTION, first.message, OTHER)
    nodes = record.close(0.0).nodes
    assert [node.parent for node in nodes][:4] == [None, 0, 1, 2]
    assert nodes[2].token_ids.tolist() == [11, 12, 13]
    assert nodes[4].parent == 1


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), num_programs=st.integers(1, 5))
def test_under_any_aborts_and_any_number_of_calls_at_once_tokens_and_branches_are_those_of_a_calm_run(
    chat, seed, num_programs
):
    async def play(engine):
        record, conversations = make(chat, engine)

        async def one(number: int) -> list[int]:
            asked = Message(Role.USER, f"what is the count of {number}?")
            first = await ask(conversations, asked)
            result = replace(RESULT, tool_call_id=first.message.tool_calls[0].id, content=f"{number}")
            await ask(conversations, asked, first.message, result)
            return [*chat.open([asked], TOOLS), *first.token_ids.tolist()]

        begun = await asyncio.gather(*(one(number) for number in range(num_programs)))
        return record.close(0.0), begun

    script = in_turn(CALL, ANSWER)
    engine = InterruptedEngine(chat, script, seed)
    (stormy, _), (calm, begun) = asyncio.run(play(engine)), asyncio.run(play(InterruptedEngine(chat, script)))

    def found(episode):
        return sorted(tuple(t.token_ids.tolist()) for t in build_trajectories(episode))

    # call ids have the number of their turn, which the order of replies decides, and no token of it
    assert found(stormy) == found(calm)
    assert len(found(stormy)) == num_programs
    assert all(any(list(branch[: len(start)]) == start for branch in found(stormy)) for start in begun)
    sampled = sorted(tuple(node.token_ids.tolist()) for node in stormy.nodes if node.sample is not None)
    assert sampled == sorted(tuple(ids) for ids in engine.deliveries.values())
    assert not any(node.is_open for node in stormy.nodes)
    assert sorted(turn.index for turn in stormy.turns) == list(range(2 * num_programs))
    assert all(stormy.nodes[turn.reply_node].turn == turn.index for turn in stormy.turns)


async def test_replies_in_the_making_are_on_record_as_open_nodes_each_behind_its_prompt(chat):
    """Two calls at once, both cut off: the episode holds what came of each."""

    class Stuck(InterruptedEngine):
        async def generate(self, request):
            if request.prompt_ids.tobytes() in self._begun:
                await asyncio.Event().wait()
            return await super().generate(request)

    engine = Stuck(chat, in_turn(ANSWER), seed=0)
    engine._random.randint = lambda least, most: min(3, most)
    record, conversations = make(chat, engine)
    calls = [asyncio.create_task(ask(conversations, text)) for text in (QUESTION, OTHER)]
    while sum(node.is_open for node in record.close(0.0).nodes) < 2:
        await asyncio.sleep(0)
    nodes = record.close(0.0).nodes
    assert [(node.index, node.parent, node.is_open) for node in nodes] == [
        (0, None, False),
        (1, 0, True),
        (2, None, False),
        (3, 2, True),
    ]
    assert {tuple(nodes[n].token_ids.tolist()) for n in (0, 2)} == {
        tuple(chat.open([text], TOOLS).tolist()) for text in (QUESTION, OTHER)
    }
    for call in calls:
        call.cancel()


async def test_tokens_of_all_replies_together_are_bounded_also_of_replies_at_once(chat):
    length = len(chat.complete(ANSWER))
    limits = replace(LIMITS, max_reply_tokens=length, max_sampled_tokens=2 * length + 1)
    record, conversations = make(chat, InterruptedEngine(chat, in_turn(ANSWER), seed=1), limits)
    await asyncio.gather(ask(conversations, QUESTION), ask(conversations, OTHER))
    cut = await ask(conversations, SYSTEM, QUESTION)
    assert (cut.finish, len(cut.token_ids)) == (FinishReason.LENGTH, 1)
    with pytest.raises(TokensSpentError, match=f"the {2 * length + 1} tokens of all replies are spent"):
        await ask(conversations, SYSTEM, OTHER)
    assert record.close(0.0).num_sampled_tokens == 2 * length + 1


async def test_a_conversation_without_room_is_refused_and_leaves_nothing_on_record(chat):
    record, conversations = make(chat, ScriptedEngine(chat, in_turn(ANSWER)), replace(LIMITS, max_context_tokens=4))
    with pytest.raises(ContextFullError):
        await ask(conversations, QUESTION)
    assert record.close(0.0).nodes == ()
