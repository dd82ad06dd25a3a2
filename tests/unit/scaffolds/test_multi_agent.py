from __future__ import annotations

import json

import pytest
from scaffold_parts import FACTS, FACTS_OPENING, SQL, SQL_ANSWER, SQL_SCHEMA, Game, calls_of, say

from agentrl.orchestration.players import build_scaffold
from agentrl.rollouts.config import ScaffoldConfig
from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role, ToolCall
from agentrl_scaffolds.multi_agent import MultiAgent

LOOK = Message(Role.ASSISTANT, "I look.", (ToolCall("", "schema"),))
QUERY = Message(Role.ASSISTANT, "", (ToolCall("", "query", {"sql": SQL.query}),))
ASKED = f"query {json.dumps({'sql': SQL.query})}"
PLANNER = {
    SQL.question: say("Look first."),
    f"Result: {SQL_SCHEMA}": say("Now ask."),
    f"Result: {SQL_ANSWER}": say("That is it."),
}
SOLVER = {"planner: Look first.": LOOK, "planner: Now ask.": QUERY, "planner: That is it.": say(SQL_ANSWER)}


def sql_game(scaffold: MultiAgent | None = None) -> Game:
    return Game("sql", scaffold or MultiAgent(), {"planner": PLANNER, "solver": SOLVER})


async def test_each_agent_hears_the_others_by_name_and_what_the_environment_answers(chat):
    game = sql_game()
    episode = await game.play(chat)
    assert (episode.reward, episode.failure) == (1.0, None)
    assert [turn.agent for turn in episode.turns] == ["planner", "solver"] * 3
    question = ("user", SQL.question)
    assert game.engines["planner"].told(2)[1:] == [
        question,
        ("assistant", "Look first."),
        ("user", "solver: I look.\nschema {}"),
        ("user", f"Result: {SQL_SCHEMA}"),
        ("assistant", "Now ask."),
        ("user", f"solver: {ASKED}"),
        ("user", f"Result: {SQL_ANSWER}"),
    ]
    assert game.engines["solver"].told(2)[1:] == [
        question,
        ("user", "planner: Look first."),
        ("assistant", "I look."),
        ("tool", SQL_SCHEMA),
        ("user", "planner: Now ask."),
        ("assistant", ""),
        ("tool", SQL_ANSWER),
        ("user", "planner: That is it."),
    ]


async def test_only_what_the_actor_does_reaches_the_environment_and_only_it_has_tools(chat):
    game = sql_game()
    episode = await game.play(chat)
    assert [name for _, name, _ in calls_of(episode)] == ["schema", "query"]
    assert [turn.agent for turn in episode.turns if turn.effects] == ["solver", "solver"]
    prompts = {n: chat.tokenizer.decode(e.requests[0].prompt_ids.tolist()) for n, e in game.engines.items()}
    assert ["Run one SELECT" in prompts[name] for name in ("planner", "solver")] == [False, True]


async def test_every_agent_is_told_who_it_is_and_who_acts(chat):
    game = sql_game(MultiAgent(prompts={"solver": "Solve it."}))
    await game.play(chat)
    assert game.engines["solver"].told(0)[0] == ("system", "Solve it.")
    role, text = game.engines["planner"].told(0)[0]
    assert role == "system"
    assert text.startswith("You are planner. You do a task together with solver,")
    assert "solver alone acts" in text


async def test_the_actor_may_speak_first_and_others_after_it(chat):
    critic = {f"Result: {SQL_ANSWER}": say("That is it.")}
    solver = {SQL.question: QUERY, "critic: That is it.": say(SQL_ANSWER)}
    game = Game("sql", MultiAgent(["solver", "critic"], actor="solver"), {"critic": critic, "solver": solver})
    episode = await game.play(chat)
    assert (episode.reward, [turn.agent for turn in episode.turns]) == (1.0, ["solver", "critic", "solver"])
    assert [turn.agent for turn in episode.turns if turn.effects] == ["solver"]


async def test_one_agent_alone_is_an_agent(chat):
    told = [FACTS_OPENING, *(question.text for question in FACTS.questions[1:])]
    replies = {text: say(question.answer) for text, question in zip(told, FACTS.questions, strict=True)}
    episode = await Game("facts", MultiAgent(), {"agent": replies}).play(chat)
    assert (episode.reward, len(episode.turns)) == (1.0, 3)


@pytest.mark.parametrize(
    "scaffold",
    [
        MultiAgent(["planner", "sover"]),
        MultiAgent(actor="sover"),
        MultiAgent(prompts={"sover": "Solve it."}),
    ],
    ids=["order", "actor", "prompts"],
)
async def test_a_name_that_the_recipe_does_not_have_fails_the_episode_before_it_begins(scaffold, chat):
    episode = await sql_game(scaffold).play(chat)
    assert str(episode.failure) == (
        "scaffold(unknown_agent): no agent 'sover' acts here; the recipe names planner, solver"
    )
    assert episode.turns == ()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"order": "planner"}, "order is 'planner'; give a list of names"),
        ({"order": [1]}, "give a list of names"),
        ({"order": ["a", "b"], "actor": "c"}, "actor 'c' is not in order"),
        ({"order": ["a", "b"], "prompts": {"c": "?"}}, r"prompts of \['c'\], who are not in order"),
        ({"order": ["a", "a", "b"]}, "'a' speaks twice in a row"),
        ({"order": ["a", "b", "a"], "actor": "b"}, "'a' speaks twice in a row"),
    ],
)
def test_an_order_in_which_nobody_can_act_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        build_scaffold(ScaffoldConfig(name="multi_agent", options=options))
