from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rollout_parts import ANSWER, CALL, LIMITS, QUESTION, RESULT, TOOLS, in_turn, make_session

from agentrl.rollouts.replies import ContextFullError
from agentrl.testing.scripted import AbortingEngine, ScriptedEngine
from agentrl.types.errors import EpisodeError
from agentrl.types.generation import FinishReason, Generation, KeptTokens
from agentrl.types.message import Message, Role
from agentrl.types.trajectory import build_trajectories
from agentrl.types.version import PolicyVersion, VersionSpan

V0 = PolicyVersion(0, 0)


class EngineOf(ScriptedEngine):
    """Answers with given generations, whatever is asked."""

    def __init__(self, chat, *generations: Generation) -> None:
        super().__init__(chat, in_turn(ANSWER))
        self._generations = list(generations)

    async def generate(self, request) -> Generation:
        return self._generations.pop(0)


def generation(num_tokens: int, finish: FinishReason = FinishReason.STOP, **changes) -> Generation:
    spans = (VersionSpan(V0, 0, num_tokens),) if num_tokens else ()
    ids = np.arange(300, 300 + num_tokens, dtype=np.int32)
    made = Generation(ids, np.full(num_tokens, -0.5, np.float32), spans, spans, finish)
    return replace(made, **changes)


async def test_every_turn_appends_exactly_what_is_new(chat):
    engine = AbortingEngine(chat, in_turn(CALL, CALL, ANSWER), cuts=[])
    record, session = make_session(chat, engine)
    await session.generate([QUESTION], TOOLS)
    await session.generate([RESULT], TOOLS)
    await session.generate([RESULT], TOOLS)
    episode = record.close(0.0)
    assert [node.parent for node in episode.nodes] == [None, 0, 1, 2, 3, 4]
    assert [node.sample is not None for node in episode.nodes] == [False, True] * 3
    context = np.concatenate([node.token_ids for node in episode.nodes])
    for request in engine.requests:
        assert np.array_equal(request.prompt_ids, context[: len(request.prompt_ids)])
    conversation = [QUESTION, CALL, RESULT, CALL, RESULT]
    whole = np.concatenate([chat.open(conversation, TOOLS), chat.complete(ANSWER)])
    assert np.array_equal(context, whole)


async def test_sampled_tokens_and_their_logprobs_are_those_that_the_engine_delivered(chat):
    engine = AbortingEngine(chat, in_turn(CALL, ANSWER), cuts=[3, 0, 2])
    record, session = make_session(chat, engine)
    await session.generate([QUESTION], TOOLS)
    await session.generate([RESULT], TOOLS)
    sampled = [node for node in record.close(0.0).nodes if node.sample is not None]
    assert np.concatenate([node.token_ids for node in sampled]).tolist() == engine.delivered
    assert not any(node.is_open for node in sampled)


async def test_an_abort_splits_the_versions_and_nothing_else(chat):
    engine = AbortingEngine(chat, in_turn(ANSWER), cuts=[2, 0, 3])
    record, session = make_session(chat, engine)
    reply = await session.generate([QUESTION])
    length = len(chat.complete(ANSWER))
    spans = (
        VersionSpan(PolicyVersion(0, 0), 0, 2),
        VersionSpan(PolicyVersion(0, 2), 2, 5),
        VersionSpan(PolicyVersion(0, 3), 5, length),
    )
    assert reply.node.sample.versions == reply.node.sample.kv_versions == spans
    assert (record.last_turn.aborts, record.num_turns) == (3, 1)
    assert reply.message.content == ANSWER.content


async def test_a_continued_request_asks_for_the_rest_with_the_same_seed_and_a_new_id(chat):
    engine = AbortingEngine(chat, in_turn(ANSWER), cuts=[2, 3])
    _record, session = make_session(chat, engine)
    await session.generate([QUESTION])
    first, second, third = engine.requests
    assert [r.max_new_tokens for r in engine.requests] == [512, 510, 507]
    assert len({r.seed for r in engine.requests}) == 1
    assert len({r.rid for r in engine.requests}) == 3
    assert third.prompt_ids[: len(second.prompt_ids)].tolist() == second.prompt_ids.tolist()
    assert len(third.prompt_ids) - len(first.prompt_ids) == 5


async def test_a_reply_in_the_making_is_on_record_as_an_open_node_that_the_whole_one_replaces(chat):
    seen = []

    class Watched(AbortingEngine):
        async def generate(self, request):
            seen.append([(n.index, len(n.token_ids), n.is_open) for n in record.close(0.0).nodes[1:]])
            return await super().generate(request)

    record, session = make_session(chat, Watched(chat, in_turn(ANSWER), cuts=[2, 3]))
    reply = await session.generate([QUESTION])
    assert seen == [[], [(1, 2, True)], [(1, 5, True)]]
    nodes = record.close(0.0).nodes
    assert [(n.index, n.is_open) for n in nodes] == [(0, False), (1, False)]
    assert nodes[1] is reply.node


async def test_a_rewrite_opens_a_branch_that_shares_the_prefix(chat):
    engine = ScriptedEngine(chat, in_turn(CALL, ANSWER))
    record, session = make_session(chat, engine)
    await session.generate([QUESTION], TOOLS)
    await session.generate([RESULT], TOOLS)
    other = Message(Role.TOOL, "45", tool_call_id="call")
    await session.rewrite([QUESTION, CALL, other], TOOLS)
    await session.generate([Message(Role.USER, "name")], TOOLS)
    episode = record.close(0.0)
    assert [node.parent for node in episode.nodes] == [None, 0, 1, 2, 1, 4, 5, 6]
    first, second = build_trajectories(episode)
    assert np.array_equal(
        second.token_ids,
        np.concatenate(
            [
                chat.open([QUESTION, CALL, other, ANSWER, Message(Role.USER, "name")], TOOLS),
                chat.complete(ANSWER),
            ]
        ),
    )
    shared = len(episode.nodes[0].token_ids) + len(episode.nodes[1].token_ids)
    assert np.array_equal(first.token_ids[:shared], second.token_ids[:shared])
    assert set(first.weights[first.turns == 0]) == {0.5}


async def test_a_branch_draws_with_random_numbers_of_its_own(chat):
    engine = AbortingEngine(chat, in_turn(ANSWER), cuts=[])
    _record, session = make_session(chat, engine)
    await session.generate([QUESTION])
    await session.rewrite([QUESTION])
    first, second = engine.requests
    assert first.seed != second.seed


async def test_a_context_without_room_is_an_outcome_and_not_a_request(chat):
    prompt = len(chat.open([QUESTION], TOOLS))
    engine = AbortingEngine(chat, in_turn(CALL), cuts=[])
    _record, session = make_session(chat, engine, replace(LIMITS, max_context_tokens=prompt))
    with pytest.raises(ContextFullError, match=f"resulted in {prompt} tokens"):
        await session.generate([QUESTION], TOOLS)
    assert engine.requests == []


async def test_a_reply_may_use_the_room_that_is_left_and_no_more(chat):
    prompt = len(chat.open([QUESTION], TOOLS))
    engine = AbortingEngine(chat, in_turn(CALL), cuts=[1])
    _record, session = make_session(chat, engine, replace(LIMITS, max_context_tokens=prompt + 4))
    reply = await session.generate([QUESTION], TOOLS)
    assert (len(reply.node.token_ids), reply.finish) == (4, FinishReason.LENGTH)
    assert [r.max_new_tokens for r in engine.requests] == [4, 3]


async def test_an_abort_at_the_last_token_of_the_budget_is_the_end_of_the_reply(chat):
    engine = EngineOf(chat, generation(3, FinishReason.ABORT))
    _record, session = make_session(chat, engine, replace(LIMITS, max_reply_tokens=3))
    assert (await session.generate([QUESTION])).finish is FinishReason.LENGTH


async def test_a_turn_adds_up_what_was_drawn_again_in_its_parts_and_keeps_it_when_the_environment_has_acted(chat):
    parts = [generation(3, FinishReason.ABORT, regenerated_tokens=3), generation(4, regenerated_tokens=6)]
    record, session = make_session(chat, EngineOf(chat, *parts))
    await session.generate([QUESTION])
    assert record.last_turn.regenerated_tokens == 9
    record.end_turn((), 0.5)
    assert (record.last_turn.regenerated_tokens, record.last_turn.environment_s) == (9, 0.5)


async def test_kept_sets_of_both_parts_stand_one_behind_the_other(chat):
    first = generation(2, FinishReason.ABORT, kept_tokens=KeptTokens.from_lists([[300, 7], [301]]))
    second = generation(1, kept_tokens=KeptTokens.from_lists([[300, 8, 9]]))
    _record, session = make_session(chat, EngineOf(chat, first, second))
    kept = (await session.generate([QUESTION])).node.sample.kept_tokens
    assert (kept.ids.tolist(), kept.offsets.tolist()) == ([300, 7, 301, 300, 8, 9], [0, 2, 3, 6])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (generation(3, logprobs=np.zeros(2, np.float32)), "2 logprobs for 3 tokens"),
        (generation(2, logprobs=np.asarray([-1, np.nan], np.float32)), "not finite or above 0"),
        (generation(2, logprobs=np.asarray([-1, 0.5], np.float32)), "not finite or above 0"),
        (generation(3, versions=(VersionSpan(V0, 0, 2),)), "do not tile 3 tokens"),
        (generation(3, kv_versions=()), "kv_versions"),
        (generation(3, kept_tokens=KeptTokens.from_lists([[1]])), "1 kept sets for 3 tokens"),
        (generation(0), "a reply without tokens"),
    ],
)
async def test_an_answer_that_breaks_the_contract_is_a_failure_and_never_recorded(chat, broken, message):
    record, session = make_session(chat, EngineOf(chat, broken))
    with pytest.raises(EpisodeError, match=message) as caught:
        await session.generate([QUESTION])
    assert caught.value.failure.boundary == "contract"
    assert len(record.close(0.0).nodes) == 1
