"""The official SDKs against the real server: what they get, and what the episode holds of it."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import anthropic
import openai
import pytest
from gateway_parts import ANSWER, ASKED, QUESTION, TOOL, Held, client, play, raw, script

from agentrl.gateway.starting import LazyGateway
from agentrl.testing.scripted import AbortingEngine, ScriptedEngine
from agentrl.testing.tiny import tiny_chat
from agentrl.types import errors
from agentrl.types.episode import StopReason
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.trajectory import build_trajectories


@pytest.fixture(scope="session")
def chat(tiny_model):
    return tiny_chat(tiny_model)


def in_chat(streams: bool):
    """Two turns in Chat Completions."""

    async def agent(access) -> None:
        messages = [{"role": "user", "content": QUESTION}]
        async with client(access) as api:
            for _ in range(2):
                if streams:
                    async with api.chat.completions.stream(model="agent", messages=messages, tools=[TOOL]) as stream:
                        reply = (await stream.get_final_completion()).choices[0].message
                else:
                    answer = await api.chat.completions.create(model="agent", messages=messages, tools=[TOOL])
                    reply = answer.choices[0].message
                messages.append(reply.model_dump(exclude_none=True, exclude={"parsed"}))
                for call in reply.tool_calls or ():
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "93"})
            assert messages[-1]["content"] == ANSWER.content

    return agent


def in_responses(streams: bool):
    """Two turns in Responses."""

    async def agent(access) -> None:
        items = [{"role": "user", "content": QUESTION}]
        tool = {"type": "function", "strict": False, **TOOL["function"]}
        async with client(access) as api:
            for _ in range(2):
                if streams:
                    async with api.responses.stream(model="agent", input=items, tools=[tool]) as stream:
                        response = await stream.get_final_response()
                else:
                    response = await api.responses.create(model="agent", input=items, tools=[tool])
                for item in response.output:
                    items.append(item.model_dump(exclude_none=True, exclude={"parsed_arguments"}))
                    if item.type == "function_call":
                        items.append({"type": "function_call_output", "call_id": item.call_id, "output": "93"})
            assert response.output_text == ANSWER.content

    return agent


def in_messages(streams: bool):
    """Two turns in Messages."""

    async def agent(access) -> None:
        messages = [{"role": "user", "content": QUESTION}]
        tool = {"name": "query", "description": "Query.", "input_schema": {"type": "object"}}
        async with anthropic.AsyncAnthropic(base_url=access.url, api_key=access.key, max_retries=0) as api:
            for _ in range(2):
                asked = {"model": "agent", "max_tokens": 200, "messages": messages, "tools": [tool]}
                if streams:
                    async with api.messages.stream(**asked) as stream:
                        reply = await stream.get_final_message()
                else:
                    reply = await api.messages.create(**asked)
                messages.append({"role": "assistant", "content": [b.model_dump() for b in reply.content]})
                results = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": "93"}
                    for block in reply.content
                    if block.type == "tool_use"
                ]
                if results:
                    messages.append({"role": "user", "content": results})
            assert reply.content[-1].text == ANSWER.content

    return agent


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("agent", [in_chat, in_responses, in_messages])
async def test_two_turns_by_an_official_sdk_are_one_branch_of_exactly_the_delivered_tokens(chat, agent, streams):
    engine = AbortingEngine(chat, script, cuts=[3, 0, 2, 5])
    episode = await play(chat, engine, agent(streams))
    assert episode.failure is None, episode.failure
    (trajectory,) = build_trajectories(episode)
    assert trajectory.token_ids[trajectory.sampled].tolist() == engine.delivered
    assert [turn.aborts for turn in episode.turns] == [4, 0]
    assert (episode.stop_reason, episode.counts["calls"]) == (StopReason.ANSWERED, 2)


async def test_a_session_is_found_by_its_path_without_a_key(chat):
    async def agent(access):
        async with openai.AsyncOpenAI(base_url=f"{access.url}/sessions/{access.key}/v1", api_key="none") as api:
            await api.chat.completions.create(**ASKED)
            assert [model.id async for model in api.models.list()] == ["agent"]

    assert (await play(chat, ScriptedEngine(chat, script), agent)).counts["calls"] == 1


async def test_who_has_no_key_or_that_of_an_episode_that_is_over_gets_nothing(chat):
    gateway, known = LazyGateway(), []

    async def agent(access):
        known.append(access)
        await raw(access, "/v1/chat/completions", ASKED)
        nobody = await raw(access, "/v1/chat/completions", ASKED, {"authorization": "Bearer made-up"})
        assert (nobody.status_code, nobody.json()["error"]["code"]) == (401, "authentication_error")

    episode = await play(chat, ScriptedEngine(chat, script), agent, gateway)
    late = await raw(known[0], "/v1/chat/completions", ASKED)
    await gateway.close()
    assert (late.status_code, late.headers["x-should-retry"]) == (401, "false")
    assert "session is over" in late.json()["error"]["message"]
    assert (len(episode.turns), episode.failure) == (1, None)


async def test_a_program_that_goes_on_calling_is_stopped_by_the_episode_and_told_never_to_retry(chat):
    async def agent(access):
        async with client(access) as api:
            for _ in range(61):
                await api.chat.completions.create(**ASKED)

    episode = await play(chat, ScriptedEngine(chat, script), agent, max_turns=3)
    assert (episode.stop_reason, len(episode.turns), episode.failure) == (StopReason.MAX_TURNS, 3, None)
    assert episode.reward is not None


async def test_a_program_that_has_spent_its_tokens_is_stopped(chat):
    async def agent(access):
        while True:
            answer = await raw(access, "/v1/chat/completions", ASKED)
            if answer.status_code != 200:
                return

    episode = await play(chat, ScriptedEngine(chat, script), agent, max_sampled_tokens=50, max_turns=100)
    assert (episode.stop_reason, episode.num_sampled_tokens) == (StopReason.MAX_TOKENS, 50)


async def test_a_conversation_that_is_too_long_is_refused_by_name_and_the_program_goes_on(chat):
    async def agent(access):
        long = {**ASKED, "messages": [{"role": "user", "content": "count " * 5000}]}
        refused = await raw(access, "/v1/chat/completions", long)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        in_messages = await raw(access, "/v1/messages", {**long, "max_tokens": 5}, {"x-api-key": access.key})
        assert in_messages.json()["error"]["message"].startswith("prompt is too long")
        streamed = await raw(access, "/v1/chat/completions", {**long, "stream": True})
        assert streamed.status_code == 400
        await raw(access, "/v1/chat/completions", ASKED)

    episode = await play(chat, ScriptedEngine(chat, script), agent, max_context_tokens=1000)
    assert (episode.failure, len(episode.turns), episode.counts["refused"]) == (None, 1, 3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n": 2}, "n"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"top_logprobs": 5, "logprobs": True}, "logprobs"),
        ({"tools": [TOOL] * 9000 + [{"type": "function"}]}, "tools[9000]"),
    ],
    ids=["n", "image", "no list", "top_logprobs", "a megabyte of tools with one that is none"],
)
async def test_what_no_policy_gives_is_refused_by_its_name(chat, changes, named):
    async def agent(access):
        answer = await raw(access, "/v1/chat/completions", {**ASKED, **changes})
        assert answer.status_code == 400
        assert named in answer.json()["error"]["message"] + str(answer.json()["error"]["param"])
        assert answer.headers["x-should-retry"] == "false"
        await raw(access, "/v1/chat/completions", ASKED)

    episode = await play(chat, ScriptedEngine(chat, script), agent)
    assert (len(episode.turns), episode.failure) == (1, None)
    assert episode.counts["refused"] == 1


async def test_a_megabyte_of_tools_is_read_and_refused_for_its_length(chat):
    async def agent(access):
        tool = {**TOOL, "function": {**TOOL["function"], "description": "x" * 1_000_000}}
        answer = await raw(access, "/v1/chat/completions", {**ASKED, "tools": [tool]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        await raw(access, "/v1/chat/completions", ASKED)

    assert len((await play(chat, ScriptedEngine(chat, script), agent)).turns) == 1


async def test_logprobs_are_those_of_the_tokens_on_record(chat):
    async def agent(access):
        async with client(access) as api:
            answer = await api.chat.completions.create(**ASKED, logprobs=True)
            given.extend(entry.logprob for entry in answer.choices[0].logprobs.content)

    given: list[float] = []
    episode = await play(chat, AbortingEngine(chat, script, []), agent)
    (reply,) = [node for node in episode.nodes if node.sample is not None]
    assert given == pytest.approx(reply.sample.logprobs.tolist())


async def test_a_model_that_is_an_agent_is_played_by_its_policy_and_any_other_by_the_first(chat):
    async def agent(access):
        for model in ("second", "gpt-4o-mini"):
            await raw(access, "/v1/chat/completions", {**ASKED, "model": model})

    episode = await play(chat, ScriptedEngine(chat, script), agent, agents=("first", "second"))
    assert [turn.agent for turn in episode.turns] == ["second", "first"]
    assert episode.counts["overrides_model"] == 1


async def test_an_engine_that_fails_fails_the_episode_whatever_the_program_does(chat):
    class Failing(ScriptedEngine):
        async def generate(self, request):
            raise EpisodeError(Boundary.ENGINE, "gone", "no engine is left")

    async def agent(access):
        for _ in range(3):
            answer = await raw(access, "/v1/chat/completions", {**ASKED, "stream": True})
            assert answer.status_code == 401
            assert json.loads(answer.text)["error"]["code"] == "session_over"

    episode = await play(chat, Failing(chat, script), agent)
    assert (episode.failure.boundary, episode.failure.kind) == (Boundary.ENGINE, "gone")


async def test_the_deadline_of_the_episode_ends_calls_in_flight(chat, monkeypatch):
    engine = Held(chat)
    answers, limits = [], []  # the first limit is that of the episode

    def timeout(seconds):
        limits.append(asyncio.timeout(seconds))
        return limits[-1]

    async def agent(access):
        call = asyncio.create_task(raw(access, "/v1/chat/completions", ASKED))
        answers.append(call)
        await engine.asked.wait()
        limits[0].reschedule(asyncio.get_running_loop().time())
        await asyncio.Event().wait()

    monkeypatch.setattr(errors, "asyncio", SimpleNamespace(timeout=timeout))
    gateway = LazyGateway()
    episode = await play(chat, engine, agent, gateway)
    answer = await answers[0]
    await gateway.close()
    assert (episode.failure.boundary, episode.failure.kind) == (Boundary.TIMEOUT, "episode")
    assert answer.status_code == 401


async def test_another_dialect_is_told_which_there_are(chat):
    async def agent(access):
        answer = await raw(access, "/v1/completions", {"model": "agent", "prompt": "hi"})
        assert answer.status_code == 404
        assert "/v1/chat/completions" in answer.text
        await raw(access, "/v1/chat/completions", ASKED)

    assert len((await play(chat, ScriptedEngine(chat, script), agent)).turns) == 1
