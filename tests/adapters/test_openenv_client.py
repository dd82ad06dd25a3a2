"""agentrl's client against OpenEnv's own servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.hosting import build_host
from agentrl.protocols import Environment
from agentrl.types.errors import EpisodeError
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Split

CALL_S = 120.0


@asynccontextmanager
async def playing(url: str, folder: Path, placement="inline", **options) -> AsyncIterator[Environment]:
    config = EnvironmentConfig(name="openenv", options={"url": url, **options}, placement=placement)
    host = await build_host(config, CALL_S, folder)
    try:
        (task,) = await host.sample(Split.TRAIN, 0, [0])
        async with host.open(task) as environment:
            yield environment
    finally:
        await host.close()


def calling(name: str, **arguments) -> Message:
    return Message(Role.ASSISTANT, tool_calls=(ToolCall("call-0", name, arguments),))


def texts(result) -> list[str]:
    return [message.content for message in result.messages]


@pytest.mark.parametrize("placement", ["inline", "process"])
async def test_an_action_of_its_own_is_one_tool_and_rewards_add_up(echo_url, tmp_path, placement):
    async with playing(echo_url, tmp_path, placement) as environment:
        opening = await environment.start()
        (tool,) = opening.tools
        assert (tool.name, tool.parameters["required"], list(tool.parameters["properties"])) == (
            "act",
            ["word"],
            ["word"],
        )
        assert opening.messages[-1].content.startswith("seed ")
        first = await environment.step(calling("act", word="hello"))
        assert (texts(first), first.is_done) == (["hello"], False)
        last = await environment.step(calling("act", word="stop"))
        assert (texts(last), last.is_done) == (["stop"], True)
        assert (await environment.score()).reward == len("hello") + len("stop")


async def test_a_task_decides_the_seed_that_the_server_is_reset_with(echo_url, tmp_path):
    rows = tmp_path / "tasks.jsonl"
    rows.write_text("".join(json.dumps({"seed": seed}) + "\n" for seed in (11, 12)))
    async with playing(echo_url, tmp_path, tasks=str(rows), instructions="Echo.") as environment:
        opening = await environment.start()
    assert [message.role for message in opening.messages] == [Role.SYSTEM, Role.USER]
    assert opening.messages[1].content in {"seed 11", "seed 12"}


async def test_an_action_that_breaks_the_schema_is_an_observation_and_the_session_goes_on(echo_url, tmp_path):
    async with playing(echo_url, tmp_path) as environment:
        await environment.start()
        wrong = await environment.step(calling("act", wrod="hello"))
        assert "word" in texts(wrong)[0]
        assert texts(wrong)[0].startswith("error: ")
        assert texts(await environment.step(calling("act", word="right"))) == ["right"]


async def test_what_the_environment_raises_fails_the_episode(echo_url, tmp_path):
    async with playing(echo_url, tmp_path) as environment:
        await environment.start()
        with pytest.raises(EpisodeError, match=r"environment\(step\): .*the echo is broken"):
            await environment.step(calling("act", word="fail"))


async def test_a_step_that_hangs_is_a_timeout_and_its_session_is_not_used_again(echo_url, tmp_path):
    async with playing(echo_url, tmp_path) as environment:
        await environment.start()
        environment._environment._socket._call_s = 2.0
        with pytest.raises(EpisodeError, match=r"timeout\(environment.step\)"):
            await environment.step(calling("act", word="hang"))
        with pytest.raises(EpisodeError, match=r"environment\(lost\)"):
            await environment.step(calling("act", word="hello"))


async def test_mcp_tools_are_listed_called_and_their_errors_read(sums_url, tmp_path):
    async with playing(sums_url, tmp_path) as environment:
        opening = await environment.start()
        assert [tool.name for tool in opening.tools] == ["add", "divide"]
        assert opening.tools[0].description == "Add two numbers."
        assert texts(await environment.step(calling("add", a=20, b=22))) == ["42"]
        assert "division by zero" in texts(await environment.step(calling("divide", a=1, b=0)))[0]
        assert texts(await environment.step(calling("add", a="many", b=1)))[0].startswith("error: ")
        assert texts(await environment.step(calling("root", a=4)))[0] == "error: no tool 'root'; there is add, divide"
        assert (await environment.score()).reward is None


async def test_a_full_server_is_waited_for_and_named_when_it_stays_full(openenv_server, tmp_path):
    with openenv_server("echo", 1) as url:
        async with playing(url, tmp_path) as holder:
            await holder.start()
            async with playing(url, tmp_path, full_s=1.0) as refused:
                with pytest.raises(EpisodeError, match=r"environment\(capacity\): .* is full: .*raise its limit"):
                    await refused.start()
            async with playing(url, tmp_path, full_s=100.0) as waiting:
                start = asyncio.create_task(waiting.start())
                await holder.close()
                await start
                assert texts(await waiting.step(calling("act", word="mine"))) == ["mine"]


async def test_a_server_that_ends_in_mid_episode_is_a_lost_session(openenv_server, tmp_path):
    async with AsyncExitStack() as stack:
        with openenv_server("echo", 1) as url:
            environment = await stack.enter_async_context(playing(url, tmp_path))
            await environment.start()
        with pytest.raises(EpisodeError, match=r"environment\(lost\): the session at .* is gone"):
            await environment.step(calling("act", word="hello"))
