"""What a call's prompt is, through the real server: where calls of one reply stand, system messages, and its length."""

from __future__ import annotations

from dataclasses import replace

import anthropic
import pytest
from gateway_parts import ANSWER, ASKED, CALL, QUESTION, TOOL, client, play, raw, script

from agentrl.testing.scripted import AbortingEngine, ScriptedEngine
from agentrl.testing.tiny import tiny_chat
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.trajectory import build_trajectories


@pytest.fixture(scope="session")
def chat(tiny_model):
    return tiny_chat(tiny_model)


NAMESPACE = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Sub-agents.",
    "tools": [{"type": "function", "name": "spawn_agent"}],
}
BOTH = Message(Role.ASSISTANT, "I look.", (*CALL.tool_calls, ToolCall("", "multi_agent_v1.spawn_agent", {"n": 1})))


def both(session, messages):
    return BOTH if messages[-1].role is not Role.TOOL else ANSWER


@pytest.mark.parametrize("results", ["behind", "between"])
async def test_calls_of_one_reply_are_its_own_wherever_their_results_stand(chat, results):
    """Of two calls, one in a namespace, codex may send each back before its own result."""
    engine = AbortingEngine(chat, both, cuts=[3, 5])

    async def agent(access):
        question = {"role": "user", "content": QUESTION}
        tools = [{"type": "function", **TOOL["function"]}, NAMESPACE]
        items = [question]
        async with client(access) as api:
            for _ in range(2):
                answer = await api.responses.create(model="agent", input=items, tools=tools)
                output = [item.model_dump(exclude_none=True) for item in answer.output]
                made = [item for item in output if item["type"] == "function_call"]
                names.extend((item.get("namespace"), item["name"]) for item in made)
                given = [
                    {"type": "function_call_output", "call_id": item["call_id"], "output": str(n)}
                    for n, item in enumerate(made)
                ]
                if results == "between":
                    said = output[: len(output) - len(made)]
                    items += [*said, *(item for pair in zip(made, given, strict=True) for item in pair)]
                else:
                    items += [*output, *given]
                items += [question] * (not made)
            # What came between is read the same way in a later call.
            await api.responses.create(model="agent", input=items, tools=tools)

    names: list[tuple[str | None, str]] = []
    episode = await play(chat, engine, agent)
    assert episode.failure is None, episode.failure
    (trajectory,) = build_trajectories(episode)
    assert trajectory.token_ids[trajectory.sampled].tolist() == engine.delivered
    assert names == [(None, "query"), ("multi_agent_v1", "spawn_agent")]
    assert len(episode.turns) == 3


async def test_calls_that_are_of_no_one_reply_stay_apart(chat):
    """Calls of two replies that a program sends one after the other, each before its result, are two messages."""
    engine = AbortingEngine(chat, script, cuts=[])

    async def agent(access):
        messages = [{"role": "user", "content": QUESTION}]
        async with client(access) as api:
            for _ in range(2):
                # The same question twice: replies that are no continuation of each other.
                answer = await api.chat.completions.create(model="agent", messages=messages[:1], tools=[TOOL])
                messages.append(answer.choices[0].message.model_dump(exclude_none=True))
                (call,) = answer.choices[0].message.tool_calls
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "93"})
            await api.chat.completions.create(model="agent", messages=messages, tools=[TOOL])

    episode = await play(chat, engine, agent)
    assert episode.failure is None, episode.failure
    roles = [message.role for message in engine.requests[-1].conversation]
    assert roles == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT, Role.TOOL]


async def test_a_count_is_the_length_of_the_prompt_and_none_of_the_calls(chat):
    async def agent(access):
        tool = {"name": "query", "input_schema": {"type": "object"}}
        asked = {
            "model": "agent",
            "messages": [{"role": "user", "content": QUESTION}],
            "tools": [tool],
            "system": "Hi.",
        }
        async with anthropic.AsyncAnthropic(base_url=access.url, api_key=access.key, max_retries=0) as api:
            for _ in range(2):
                counts.append((await api.messages.count_tokens(**asked)).input_tokens)
                reply = await api.messages.create(**asked, max_tokens=200)
                usage = reply.usage
                lengths.append(usage.input_tokens + usage.cache_read_input_tokens)
                results = [{"type": "tool_result", "tool_use_id": b.id, "content": "93"} for b in reply.content[1:]]
                asked["messages"] += [
                    {"role": "assistant", "content": reply.content},
                    {"role": "user", "content": results},
                ]
        by_path = await raw(access, f"/sessions/{access.key}/v1/messages/count_tokens", asked | {"messages": []})
        assert by_path.json()["error"] == {"type": "invalid_request_error", "message": "messages: there is no message"}
        by_path = await raw(access, f"/sessions/{access.key}/v1/messages/count_tokens", ASKED | {"model": "other"})
        assert by_path.json() == {"input_tokens": len(chat.open([Message(Role.USER, QUESTION)], ()))}
        nobody = await raw(access, "/v1/messages/count_tokens", ASKED, {"authorization": "Bearer made-up"})
        assert (nobody.status_code, nobody.json()["error"]["type"]) == (401, "authentication_error")
        # The calls of the episode are spent, which takes no count away.
        while (await raw(access, "/v1/messages", asked | {"max_tokens": 9})).status_code == 200:
            pass
        over = await raw(access, "/v1/messages/count_tokens", ASKED)
        assert (over.status_code, over.headers["x-should-retry"]) == (403, "false")

    counts, lengths = [], []
    episode = await play(chat, AbortingEngine(chat, script, []), agent, max_turns=2)
    assert counts == lengths
    assert counts[0] < counts[1]
    assert (episode.counts["calls"], len(episode.turns)) == (2, 2)
    assert {name: number for name, number in episode.counts.items() if number} == {"calls": 2}


REMINDED = {
    "/v1/messages": {"model": "agent", "max_tokens": 9},
    "/v1/chat/completions": {"model": "agent"},
    "/v1/responses": {"model": "agent"},
}


@pytest.mark.parametrize("path", REMINDED)
async def test_a_later_system_message_is_in_the_prompt_or_the_call_is_refused(chat, tiny_model, path):
    """Agents send reminders as system messages behind the question."""
    talk = [*ASKED["messages"], {"role": "system", "content": "the name is ada"}]
    asked = REMINDED[path] | {"input" if path == "/v1/responses" else "messages": talk}

    async def agent(access):
        answer = await raw(access, path, asked)
        statuses.append(answer.status_code)
        if answer.status_code != 200:
            assert "system message that is not the first" in answer.json()["error"]["message"]
            assert answer.json()["error"]["type"] == "invalid_request_error"
            await raw(access, "/v1/chat/completions", ASKED)

    statuses: list[int] = []
    engine = AbortingEngine(chat, script, [])
    assert (await play(chat, engine, agent)).failure is None
    assert "the name is ada" in chat.tokenizer.decode(engine.requests[0].prompt_ids.tolist())
    without = tiny_chat(tiny_model)
    without.abilities = replace(without.abilities, later_system=False)
    episode = await play(without, ScriptedEngine(without, script), agent)
    assert statuses == [200, 400]
    assert (episode.failure, len(episode.turns), episode.counts["refused"]) == (None, 1, 1)
