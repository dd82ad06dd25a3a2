from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from agentrl.sandbox.effects import Capture, EffectLog
from agentrl.testing.places import ScriptedPlace
from agentrl.types.errors import EpisodeError
from agentrl.types.sandbox import Command, Ended, SandboxSpec


@pytest.fixture
def place() -> ScriptedPlace:
    return ScriptedPlace(SandboxSpec())


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


@pytest.fixture
def log(place: ScriptedPlace, counts: Counter[str]) -> EffectLog:
    return EffectLog(place, asyncio.Lock(), counts)


async def test_an_effect_is_carried_out_once_and_told_as_often_as_it_is_asked_for(
    log: EffectLog, place: ScriptedPlace
) -> None:
    first = await log.run("a", Command(("say", "hello")))
    assert first.stdout == b"hello"
    assert await log.run("a", Command(("say", "another"))) is first
    assert await log.outcome("a") is first
    assert await log.outcome("b") is None
    assert place.commands == [("say", "hello")]


async def test_a_command_goes_on_when_its_caller_is_gone_and_its_outcome_is_told(
    log: EffectLog, place: ScriptedPlace
) -> None:
    caller = asyncio.create_task(log.run("a", Command(("hang",), timeout_s=600)))
    await place.hanging.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert place.killed == 0
    asking = asyncio.create_task(log.outcome("a"))
    await log.end()
    assert place.killed == 1
    with pytest.raises(EpisodeError, match="ended"):
        await asking


async def test_a_command_is_killed_at_its_deadline(log: EffectLog, place: ScriptedPlace, counts: Counter[str]) -> None:
    result = await log.run("a", Command(("hang",), timeout_s=0.01))
    assert (result.ended, result.exit_code, place.killed) == (Ended.TIMEOUT, 137, 1)
    await log.run("b", Command(("say", "hello")))
    await log.run("b", Command(("say", "hello")))
    assert (counts["commands"], counts["timeouts"]) == (2, 1)


async def test_a_command_that_is_stopped_is_killed_and_keeps_that_result(
    log: EffectLog, place: ScriptedPlace, counts: Counter[str]
) -> None:
    running = asyncio.create_task(log.run("a", Command(("hang",), timeout_s=600)))
    await place.hanging.wait()
    await asyncio.gather(log.stop("a"), log.stop("a"))
    assert place.killed == 1, "it had not ended when it was told to have"
    result = await running
    assert (result.ended, result.exit_code) == (Ended.STOPPED, 137)
    await log.stop("a")
    assert await log.run("a", Command(("hang",), timeout_s=600)) is result
    assert (await log.run("b", Command(("say", "on")))).stdout == b"on"
    assert (counts["stopped"], counts["timeouts"], counts["commands"]) == (1, 0, 2)


async def test_a_command_that_has_ended_keeps_its_result_when_it_is_stopped(log: EffectLog) -> None:
    result = await log.run("a", Command(("say", "hello")))
    await log.stop("a")
    assert await log.run("a", Command(("say", "hello"))) is result
    assert result.ended is Ended.EXITED


async def test_a_command_that_is_stopped_before_it_began_never_begins(log: EffectLog, place: ScriptedPlace) -> None:
    await log.stop("early")
    assert (await log.run("early", Command(("say", "hello")))).ended is Ended.STOPPED
    running = asyncio.create_task(log.run("a", Command(("hang",), timeout_s=600)))
    await place.hanging.wait()
    queued = asyncio.create_task(log.run("b", Command(("say", "hello"))))
    await asyncio.sleep(0)
    await log.stop("b")
    assert (await queued).ended is Ended.STOPPED
    assert not running.done(), "another command was stopped"
    await log.stop("a")
    assert (await running).ended is Ended.STOPPED
    assert place.commands == [("hang",)]


async def test_commands_of_one_sandbox_follow_each_other(log: EffectLog, place: ScriptedPlace) -> None:
    hanging = asyncio.create_task(log.run("a", Command(("hang",), timeout_s=0.05)))
    await place.hanging.wait()
    second = await log.run("b", Command(("say", "later")))
    assert hanging.done(), "the second was begun while the first ran"
    assert second.stdout == b"later"
    assert [what for what, *_ in place.commands] == ["hang", "say"]


async def test_of_long_output_the_beginning_is_kept_and_all_is_counted() -> None:
    capture = Capture(5)
    for chunk in (b"abc", b"defg", b"h" * 1000):
        await capture.stdout(chunk)
    await capture.stderr(b"xy")
    result = capture.result(3, 0.5, Ended.EXITED)
    assert (result.stdout, result.stdout_bytes) == (b"abcde", 1007)
    assert (result.stderr, result.stderr_bytes, result.exit_code) == (b"xy", 2, 3)
    assert result.is_cut
    assert result.text == "abcdexy"
