"""An environment in a sandbox whose process is lost at any moment, and taken up by another."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agentrl.envs.authoring import Rows, say, tool
from agentrl.envs.definition import NoOptions
from agentrl.envs.sandboxed import SandboxEnvironment, define_sandboxed, read_file
from agentrl.types.environment import Origin
from agentrl.types.errors import EpisodeError
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.sandbox import Command, SandboxSpec
from agentrl.types.task import Split
from tests.integration.sandbox_hosts import keeper

pytestmark = pytest.mark.timeout(300)


class Counting(SandboxEnvironment[NoOptions]):
    """Counts its calls, in the sandbox and in itself."""

    def prepare(self) -> None:
        self.calls = 0

    def spec(self) -> SandboxSpec:
        return SandboxSpec(needs=frozenset())

    def prompt(self) -> str:
        return "count"

    @tool
    async def count(self, wait_for: str = "") -> str:
        """Count, twice, and wait for a file between."""
        self.calls += 1
        await self._run("echo first >> counts")
        await self._run(f"until [ -z '{wait_for}' ] || [ -f {wait_for} ]; do sleep 0.05; done; echo second >> counts")
        return (await self._run("wc -l < counts")).strip()

    def reply(self, text: str) -> str | None:
        return None if text == "done" else f"you said {text}"

    def reward(self) -> float:
        return float(self.calls)

    def save(self) -> int:
        return self.calls

    def load(self, state: int) -> None:
        self.calls = state

    async def _run(self, script: str) -> str:
        return (await self.execute(Command(("sh", "-c", script)))).text


definition = define_sandboxed("counting", Counting, Rows([{"n": 1}, {"n": 2}]))


def call(number: int, **arguments: str) -> Message:
    return Message(Role.ASSISTANT, tool_calls=(ToolCall(f"episode/{number}.0", "count", arguments),))


@pytest_asyncio.fixture
async def environment() -> AsyncIterator[Counting]:
    async with keeper("local", warm=0):
        made = await new()
        await made.start()
        yield made


async def new(origin: Origin | None = None) -> Counting:
    (task,) = definition.sample(NoOptions(), Split.TRAIN, 0, [0])
    made = await definition.make(NoOptions(), task, origin)
    assert isinstance(made, Counting)
    return made


async def taken_up(lost: Counting, token: int = 1) -> Counting:
    return await new(Origin(handle=await lost.handle(), token=token))


async def counted(environment: Counting) -> list[str]:
    return (await read_file(environment.sandbox, "counts", 10_000)).decode().split()


async def test_a_step_that_had_ended_is_answered_by_its_result_and_not_carried_out_again(environment: Counting) -> None:
    first = await environment.step(call(0))
    second = await environment.step(call(1))
    other = await taken_up(environment)
    assert await other.outcome(1, ["episode/1.0"]) == second
    assert await other.outcome(0, ["episode/0.0"]) is None, "what is long on record is not asked for"
    assert (first.messages[0].content, second.messages[0].content) == ("2", "4")
    assert (await other.step(call(2))).messages[0].content == "6"
    assert await counted(other) == ["first", "second"] * 3
    assert (await other.score()).reward == 3.0


async def test_a_step_that_was_under_way_is_gone_on_with_and_none_of_its_commands_runs_twice(
    environment: Counting,
) -> None:
    await environment.step(call(0))
    stepping = asyncio.create_task(environment.step(call(1, wait_for="go")))
    # Commands of one sandbox follow each other, so its files are looked at from outside.
    while (files() / "counts").read_text().count("\n") < 3:
        await asyncio.sleep(0.02)
    stepping.cancel()
    other = await taken_up(environment, token=2)
    assert await other.outcome(1, ["episode/1.0"]) is None
    again = asyncio.create_task(other.step(call(1, wait_for="go")))
    (files() / "go").touch()
    assert (await again).messages[0].content == "4"
    assert await counted(other) == ["first", "second"] * 2
    assert (await other.score()).reward == 2.0, "the lost step's count is in the state, too"


async def test_what_was_said_without_a_call_is_taken_up_too(environment: Counting) -> None:
    said = await environment.step(say("hello"))
    other = await taken_up(environment)
    assert await other.outcome(0, []) == said
    assert (await other.step(say("done"))).is_done
    assert (await taken_up(other, token=2)).answer == "done"


async def test_who_was_replaced_can_do_nothing_more(environment: Counting) -> None:
    await taken_up(environment)
    with pytest.raises(EpisodeError, match="fenced"):
        await environment.step(call(0))


async def test_a_sandbox_that_is_gone_is_told_so_that_another_way_is_tried(environment: Counting) -> None:
    handle = await environment.handle()
    await environment.close()
    with pytest.raises(EpisodeError) as caught:
        await new(Origin(handle=handle, token=1))
    assert (caught.value.failure.boundary, caught.value.failure.kind) == ("environment", "lost")


def files() -> Path:
    """The workspace of the one sandbox, which a local keeper has among its temporary files."""
    (found,) = Path(os.environ["TMPDIR"]).glob("agentrl-local-*/[!s]*")
    return found
