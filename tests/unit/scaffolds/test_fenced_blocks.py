from __future__ import annotations

import pytest
from scaffold_parts import SQL, SQL_ANSWER, alone, calls_of

from agentrl.types.environment import Opening
from agentrl.types.errors import EpisodeError
from agentrl.types.message import Message, Role, ToolCall, ToolSpec
from agentrl_scaffolds.bash import _ADVICE as BASH_ADVICE
from agentrl_scaffolds.bash import Bash
from agentrl_scaffolds.code_act import _ADVICE as CODE_ADVICE
from agentrl_scaffolds.code_act import CodeAct
from agentrl_scaffolds.text_replies import as_user, choose_tool, find_blocks, with_system

BLOCK = f"I ask.\n```sql\n{SQL.query}\n```"
RIGHT = {SQL.question: BLOCK, f"Output:\n{SQL_ANSWER}": SQL_ANSWER}
NATIVE = Message(Role.ASSISTANT, BLOCK, (ToolCall("", "query", {"sql": "SELECT 1"}),))
TEXT = {"type": "string"}


def tool(name: str, *required: str, **properties: dict) -> ToolSpec:
    return ToolSpec(name, name.title(), {"type": "object", "properties": properties, "required": list(required)})


async def test_code_is_run_by_the_tool_that_takes_one_text_and_a_reply_without_a_block_is_the_answer(chat):
    game = alone("sql", CodeAct(), RIGHT)
    episode = await game.play(chat)
    assert (episode.reward, episode.failure) == (1.0, None)
    assert calls_of(episode) == [(f"{episode.episode_id}/0.s0", "query", {"sql": SQL.query})]
    assert "The code is run by query: Run one SELECT" in game.engine.told(0)[0][1]


@pytest.mark.parametrize(
    "reply",
    [f"{BLOCK}\n{BLOCK}", f"```\n{SQL.query}", f"```sql\n{SQL.query}\n``", NATIVE],
    ids=["two blocks", "not closed", "closed too short", "of the chat format"],
)
async def test_a_reply_that_cannot_be_read_is_a_turn_that_the_environment_does_not_see(reply, chat):
    game = alone("sql", CodeAct(), {**RIGHT, SQL.question: reply, CODE_ADVICE: BLOCK})
    episode = await game.play(chat)
    assert (episode.reward, len(episode.turns), episode.turns[0].effects) == (1.0, 3, ())
    assert len(calls_of(episode)) == 1


async def test_replies_that_cannot_be_read_come_to_an_end_with_the_turns(chat):
    game = alone("sql", CodeAct(), {SQL.question: "```", CODE_ADVICE: "```"})
    episode = await game.play(chat)
    assert (episode.stop_reason, len(episode.turns), episode.reward) == ("max_turns", 9, 0.0)


async def test_bash_runs_blocks_of_its_own_language_only(chat):
    listing = "```text\nnot to be run\n```\n```bash\n{}\n```"
    game = alone("sql", Bash(), {**RIGHT, SQL.question: listing.format(SQL.query)})
    episode = await game.play(chat)
    assert (episode.reward, [arguments for _, _, arguments in calls_of(episode)]) == (1.0, [{"sql": SQL.query}])
    game = alone("sql", Bash(), {SQL.question: f"```bash\n{SQL.query}\n```\n```sh\nls\n```", BASH_ADVICE: "none"})
    assert (await game.play(chat)).turns[0].effects == ()


async def test_a_prompt_of_the_recipe_replaces_the_one_of_the_format(chat):
    game = alone("sql", Bash(system_prompt="Type."), RIGHT | {SQL.question: f"```\n{SQL.query}\n```"})
    assert (await game.play(chat)).reward == 1.0
    assert game.engine.told(0)[0] == ("system", "Type.")


@pytest.mark.parametrize("scaffold", [CodeAct, Bash])
async def test_an_environment_without_such_a_tool_fails_the_episode_and_says_what_to_set(scaffold, chat):
    episode = await alone("facts", scaffold(), {}).play(chat)
    assert (episode.failure.boundary, episode.failure.kind, episode.turns) == ("scaffold", "no_tool", ())
    assert "the scaffold needs a tool with exactly one string argument" in episode.failure.message
    assert "option 'tool'" in episode.failure.message
    episode = await alone("sql", scaffold(tool="schema"), {}).play(chat)
    assert "finds no such tool 'schema'" in episode.failure.message
    assert "the environment has: query." in episode.failure.message


def test_the_tool_is_the_one_that_needs_a_text_and_nothing_else():
    run = tool("run", "code", code=TEXT, timeout_s={"type": "number"})
    others = [tool("look"), tool("wait", "s", s={"type": "number"}), tool("put", "a", "b", a=TEXT, b=TEXT)]
    assert choose_tool([*others, run], None)[:2] == ("run", "code")
    read = tool("read", "path", path=TEXT)
    with pytest.raises(EpisodeError, match="the environment has: run, read"):
        choose_tool([run, read], None)
    assert choose_tool([run, read], "read").argument == "path"
    assert choose_tool([ToolSpec("eval", "", {"properties": {"code": TEXT}})], None).argument == "code"


@pytest.mark.parametrize(
    ("reply", "blocks"),
    [
        ("no block", []),
        ("a ``` within a line\n", []),
        ("```\n```", [("", "")]),
        ("x\n```Python\na\n\n  b\n```\ny", [("python", "a\n\n  b")]),
        ("```sh title=1\nls\n```  ", [("sh", "ls")]),
        ("  ```\nls\n  ```", [("", "ls")]),
        ("````\n```\nls\n```\n````", [("", "```\nls\n```")]),
        ("```a\n1\n```\n```b\n2\n```", [("a", "1"), ("b", "2")]),
        ("```\nls\n```py", None),
        ("```\nls", None),
    ],
)
def test_blocks_are_found_by_their_fences(reply, blocks):
    assert find_blocks(reply) == blocks


def test_a_system_message_of_the_environment_becomes_part_of_ours():
    opening = Opening((Message(Role.SYSTEM, "its"), Message(Role.USER, "go")))
    assert with_system("ours", opening.messages) == (Message(Role.SYSTEM, "ours\n\nits"), Message(Role.USER, "go"))
    assert with_system("ours", opening.messages[1:])[0] == Message(Role.SYSTEM, "ours")


def test_only_results_of_tools_get_a_label():
    told = (Message(Role.TOOL, "93", tool_call_id="c"), Message(Role.USER, "and now?"))
    assert as_user(told, "> ") == (Message(Role.USER, "> 93"), Message(Role.USER, "and now?"))
