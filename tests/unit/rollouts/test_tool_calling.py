from __future__ import annotations

from rollout_parts import ANSWER, CALL, in_turn, play

from agentrl.testing.scripted import AbortingEngine
from agentrl.types.message import Message, Role
from agentrl_scaffolds.tool_calling import ToolCalling


async def test_the_policy_sees_the_opening_its_tools_and_every_result(chat):
    engine = AbortingEngine(chat, in_turn(CALL, CALL, ANSWER), cuts=[])
    await play(chat, engine)
    conversation = engine.requests[-1].conversation
    assert [m.role for m in conversation] == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT, Role.TOOL]
    assert conversation[2].content == "{'sql': 'select count from name'}"
    assert "Query." in chat.tokenizer.decode(engine.requests[0].prompt_ids.tolist())


async def test_a_system_prompt_stands_before_the_opening(chat):
    engine = AbortingEngine(chat, in_turn(ANSWER), cuts=[])
    await play(chat, engine, scaffold=ToolCalling(system_prompt="count well"))
    assert engine.requests[0].conversation[:2] == (Message(Role.SYSTEM, "count well"), Message(Role.USER, "count"))


async def test_a_reply_without_a_call_ends_the_episode(chat):
    episode = await play(chat, AbortingEngine(chat, in_turn(ANSWER), cuts=[]))
    assert (len(episode.turns), episode.reward) == (1, 1.0)
