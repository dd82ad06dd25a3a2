from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_parts import ANSWER, CALL, QUESTION, RESULT, TOOLS, in_turn, make_session

from agentrl.testing.scripted import AbortingEngine
from agentrl.types.version import spans_tile


async def converse(chat, cuts: list[int], moves: bool):
    engine = AbortingEngine(chat, in_turn(CALL, CALL, ANSWER), cuts, moves)
    record, session = make_session(chat, engine)
    replies = [await session.generate([QUESTION], TOOLS)]
    for _ in range(2):
        replies.append(await session.generate([RESULT], TOOLS))
    return record.close(0.0), engine, [reply.message.content for reply in replies]


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 12), max_size=12), moves=st.booleans())
def test_no_schedule_of_aborts_changes_a_token_a_logprob_or_a_span(chat, cuts, moves):
    plain, _engine, contents = asyncio.run(converse(chat, [], moves))
    aborted, engine, same_contents = asyncio.run(converse(chat, list(cuts), moves))
    assert contents == same_contents
    assert [n.parent for n in aborted.nodes] == [n.parent for n in plain.nodes]
    for node, expected in zip(aborted.nodes, plain.nodes, strict=True):
        assert np.array_equal(node.token_ids, expected.token_ids)
        if expected.sample is not None:
            assert np.array_equal(node.sample.logprobs, expected.sample.logprobs)
            assert spans_tile(node.sample.versions, len(node.token_ids))
            assert moves or node.sample.versions == expected.sample.versions
    sampled = np.concatenate([n.token_ids for n in aborted.nodes if n.sample is not None])
    assert sampled.tolist() == engine.delivered
    assert sum(turn.aborts for turn in aborted.turns) == len(engine.requests) - 3


def test_every_request_has_an_id_of_its_own_and_none_begins_another(chat):
    _, engine, _ = asyncio.run(converse(chat, [2, 0, 3], moves=True))
    ids = [request.rid for request in engine.requests]
    assert len(set(ids)) == len(ids) == 6
    assert {len(rid) for rid in ids} == {32}
