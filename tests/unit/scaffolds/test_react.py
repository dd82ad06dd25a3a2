from __future__ import annotations

import json

import pytest
from scaffold_parts import FACTS, FACTS_OPENING, SQL, SQL_ANSWER, SQL_SCHEMA, alone, calls_of, say

from agentrl.rollouts.episode_log import NoJournal
from agentrl.testing.recording_journal import RecordingJournal
from agentrl.types.message import Message, Role, ToolCall
from agentrl_scaffolds.react import _ADVICE, React

QUERY = f"Thought: now I ask.\nAction: query\nAction Input: {json.dumps({'sql': SQL.query})}"
RIGHT = {
    SQL.question: "Thought: first I look.\nAction: schema\nAction Input: {}",
    f"Observation: {SQL_SCHEMA}": QUERY,
    f"Observation: {SQL_ANSWER}": f"Thought: I know it.\nFinal Answer: {SQL_ANSWER}",
}
UNREADABLE = {
    "neither": say("I do not know."),
    "no input": say("Action: query"),
    "no object": say('Action: query\nAction Input: ["SELECT 1"]'),
    "no JSON": say("Action: query\nAction Input: SELECT 1"),
    "no number": say('Action: query\nAction Input: {"sql": NaN}'),
    "nested too deep": say("Action: query\nAction Input: " + "[" * 1500),
    "no such tool": say('Action: drop\nAction Input: {"sql": "SELECT 1"}'),
    "of the chat format": Message(Role.ASSISTANT, "", (ToolCall("", "query", {"sql": "SELECT 1"}),)),
}


async def test_actions_are_calls_and_observations_are_told_by_a_user(chat):
    game = alone("sql", React(), RIGHT)
    episode = await game.play(chat)
    assert (episode.reward, episode.failure) == (1.0, None)
    assert [(name, arguments) for _, name, arguments in calls_of(episode)] == [
        ("schema", {}),
        ("query", {"sql": SQL.query}),
    ]
    assert [role for role, _ in game.engine.told(-1)] == ["system", "user", "assistant", "user", "assistant", "user"]


async def test_calls_that_a_scaffold_makes_up_are_on_record_under_ids_of_their_own(chat):
    journal = RecordingJournal()
    episode = await alone("sql", React(), RIGHT).play(chat, journal)
    ids = [f"{episode.episode_id}/0.s0", f"{episode.episode_id}/1.s1"]
    assert [name for name, _, _ in calls_of(episode)] == ids
    assert [event for event in journal.events if event.startswith("intent")] == [f"intent {name}" for name in ids]
    assert [effect.result for turn in episode.turns for effect in turn.effects] == [SQL_SCHEMA, SQL_ANSWER]


async def test_the_policy_is_told_the_format_and_every_tool_with_its_arguments(chat):
    game = alone("sql", React(), RIGHT)
    await game.play(chat)
    role, system = game.engine.told(0)[0]
    assert role == "system"
    for part in ("Thought:", "Action:", "Action Input:", "Final Answer:", "query: Run one SELECT", "schema: List"):
        assert part in system
    assert '"sql": {"type": "string"}' in system


async def test_a_prompt_of_the_recipe_stands_before_the_tools(chat):
    game = alone("sql", React(system_prompt="Be a database."), RIGHT)
    assert (await game.play(chat)).reward == 1.0
    assert game.engine.told(0)[0][1].startswith("Be a database.\n\nTools:\nschema: ")


@pytest.mark.parametrize("kind", UNREADABLE)
async def test_a_reply_that_cannot_be_read_is_a_turn_that_the_environment_does_not_see(kind, chat):
    journal = RecordingJournal()
    replies = {**RIGHT, SQL.question: UNREADABLE[kind], _ADVICE: QUERY}
    game = alone("sql", React(), replies)
    episode = await game.play(chat, journal)
    assert (episode.reward, len(episode.turns)) == (1.0, 3)
    assert [name for _, name, _ in calls_of(episode)] == ["query"]
    assert episode.turns[0].effects == ()
    assert game.engine.told(1)[-1] == ("user", _ADVICE)


async def test_what_a_policy_makes_up_behind_its_action_does_not_count(chat):
    dream = f'Action: query\nAction Input: {{"sql": "{SQL.query}"}}\nObservation: 1\nFinal Answer: 1'
    episode = await alone("sql", React(), {**RIGHT, SQL.question: dream}).play(chat)
    assert episode.reward == 1.0


async def test_an_answer_that_does_not_end_the_episode_is_followed_by_the_next_question(chat):
    told = [FACTS_OPENING, *(question.text for question in FACTS.questions[1:])]
    replies = {text: f"Final Answer: {q.answer}" for text, q in zip(told, FACTS.questions, strict=True)}
    game = alone("facts", React(), replies)
    assert (await game.play(chat, NoJournal())).reward == 1.0
    assert game.engine.told(0)[0][1].endswith("There are no tools.")
