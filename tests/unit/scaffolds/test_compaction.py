from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scaffold_parts import FACTS, FACTS_OPENING, LIMITS, SQL, SQL_ANSWER, SQL_SCHEMA, alone, calls_of, say, shape_of

from agentrl.orchestration.players import build_scaffold
from agentrl.rollouts.config import ScaffoldConfig
from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.trajectory import build_trajectories
from agentrl_scaffolds.compaction import _INTRODUCTION, _REQUEST, Compaction
from agentrl_scaffolds.tool_calling import ToolCalling

LOOK = Message(Role.ASSISTANT, "", (ToolCall("", "schema"),))
QUERY = Message(Role.ASSISTANT, "", (ToolCall("", "query", {"sql": SQL.query}),))
SECOND, THIRD = (question.text for question in FACTS.questions[1:])
ANSWERS = {
    text: say(question.answer) for text, question in zip((FACTS_OPENING, SECOND, THIRD), FACTS.questions, strict=True)
}
NOTHING_SHORTER = 1  # tokens: every conversation is longer
NOTHING_LONGER = 10**6


def sql_game(compact_at_tokens: int, summary: str | Message = "I saw the table."):
    told = _INTRODUCTION + (summary if isinstance(summary, str) else summary.content)
    replies = {SQL.question: LOOK, SQL_SCHEMA: QUERY, SQL_ANSWER: SQL_ANSWER, _REQUEST.content: summary, told: QUERY}
    return alone("sql", Compaction(compact_at_tokens), replies)


def facts_game(compact_at_tokens: int, **options):
    facts = say(f"I was told: {FACTS.facts}")
    return alone("facts", Compaction(compact_at_tokens, **options), {**ANSWERS, _REQUEST.content: facts})


async def test_a_long_conversation_goes_on_from_opening_summary_and_the_next_question(chat):
    game = facts_game(NOTHING_SHORTER, system_prompt="Be brief.")
    episode = await game.play(chat)
    assert (episode.reward, episode.stop_reason, len(episode.turns)) == (1.0, "answered", 5)
    opening = [("system", "Be brief."), ("user", FACTS_OPENING)]
    summary = f"I was told: {FACTS.facts}"
    first, second = FACTS.questions[0].answer, FACTS.questions[1].answer
    asked = [("assistant", first), ("user", SECOND), ("user", _REQUEST.content)]
    compacted = [*opening, ("user", _INTRODUCTION + summary), ("user", SECOND)]
    again = [*compacted, ("assistant", second), ("user", THIRD), ("user", _REQUEST.content)]
    last = [*opening, ("user", _INTRODUCTION + summary), ("user", THIRD)]
    assert [game.engine.told(n) for n in range(5)] == [opening, [*opening, *asked], compacted, again, last]


async def test_tools_go_on_being_told_and_called_on_the_new_branch(chat):
    game = sql_game(NOTHING_SHORTER)
    episode = await game.play(chat)
    assert [name for _, name, _ in calls_of(episode)][:2] == ["schema", "query"]
    prompts = [chat.tokenizer.decode(request.prompt_ids.tolist()) for request in game.engine.requests]
    assert all("Run one SELECT and return its rows." in prompt for prompt in prompts)
    assert game.engine.told(2) == [("user", SQL.question), ("user", _INTRODUCTION + "I saw the table.")]
    assert len({name for name, _, _ in calls_of(episode)}) == len(calls_of(episode))


async def test_a_call_within_a_summary_is_not_run(chat):
    summary = Message(Role.ASSISTANT, "I go on.", QUERY.tool_calls)
    game = sql_game(NOTHING_SHORTER, summary)
    episode = await game.play(chat)
    assert episode.turns[1].effects == ()
    assert game.engine.told(2)[-1] == ("user", f"{_INTRODUCTION}I go on.")


async def test_a_conversation_that_stays_short_is_played_as_by_tool_calling(chat):
    compacted = await sql_game(NOTHING_LONGER).play(chat)
    plain = await alone("sql", ToolCalling(), {SQL.question: LOOK, SQL_SCHEMA: QUERY, SQL_ANSWER: SQL_ANSWER}).play(
        chat
    )
    assert compacted.reward == plain.reward == 1.0
    assert shape_of(compacted) == shape_of(plain)


async def test_the_history_is_summarised_from_the_very_number_of_tokens_on(chat):
    plain = await alone("facts", ToolCalling(), ANSWERS).play(chat)
    after_first = sum(len(node.token_ids) for node in plain.nodes[:2])
    after_second = sum(len(node.token_ids) for node in plain.nodes[:4])
    assert len((await facts_game(after_second + 1).play(chat)).turns) == 3
    late = await facts_game(after_second).play(chat)
    assert [node.parent for node in late.nodes] == [None, 0, 1, 2, 3, 4, None, 6]
    early = await facts_game(after_first).play(chat)
    assert early.nodes[3].token_ids.tolist() == chat.complete(say(f"I was told: {FACTS.facts}")).tolist()
    assert early.nodes[4].parent is None


async def test_every_sampled_token_is_in_one_branch_with_weight_one(chat):
    """By hand: replies 1 and summary 1 are the first branch, reply 2 and summary 2 the second, reply 3 the third."""
    episode = await facts_game(NOTHING_SHORTER).play(chat)
    branches = build_trajectories(episode)
    assert [sorted(set(branch.turns.tolist()) - {-1}) for branch in branches] == [[0, 1], [2, 3], [4]]
    replies = [question.answer for question in FACTS.questions]
    summary = f"I was told: {FACTS.facts}"
    drawn = [chat.complete(say(text)) for text in (replies[0], summary, replies[1], summary, replies[2])]
    assert np.concatenate([branch.token_ids[branch.sampled] for branch in branches]).tolist() == (
        np.concatenate(drawn).tolist()
    )
    for branch in branches:
        assert branch.weights[branch.sampled].tolist() == [1.0] * int(branch.sampled.sum())
        assert not branch.weights[~branch.sampled].any()


async def test_a_summary_counts_as_a_turn(chat):
    episode = await facts_game(NOTHING_SHORTER).play(chat, limits=replace(LIMITS, max_turns=2))
    assert (episode.stop_reason, len(episode.turns)) == ("max_turns", 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "compact_at_tokens"),
        ({"compact_at_tokens": 0}, "compact_at_tokens is 0; give a number above 0"),
        ({"compact_at_tokens": "long"}, "does not take options"),
    ],
)
def test_a_bound_that_is_none_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        build_scaffold(ScaffoldConfig(name="compaction", options=options))
