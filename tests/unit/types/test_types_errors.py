from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agentrl.types.errors import (
    AgentRLError,
    Boundary,
    ConfigError,
    EngineError,
    EpisodeError,
    Failure,
    boundary,
    deadline,
)


def test_a_foreign_exception_becomes_a_failure_of_the_boundary_it_crossed():
    with pytest.raises(EpisodeError) as caught, boundary(Boundary.SANDBOX, "start"):
        raise FileNotFoundError("no bwrap")
    failure = caught.value.failure
    assert (failure.boundary, failure.kind) == (Boundary.SANDBOX, "start")
    assert failure.message.startswith("FileNotFoundError: no bwrap (line ")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize("error", [EngineError("none left"), EpisodeError(Boundary.BUDGET, "tokens", "spent")])
def test_our_own_errors_cross_a_boundary_unchanged(error):
    with pytest.raises(AgentRLError) as caught, boundary(Boundary.SCAFFOLD, "run"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyboardInterrupt()])
def test_cancellation_crosses_a_boundary_unchanged(error):
    with pytest.raises(BaseException) as caught, boundary(Boundary.SCAFFOLD, "run"):  # noqa: PT011
        raise error
    assert caught.value is error


async def test_a_missed_deadline_is_a_timeout_that_names_its_stage():
    with pytest.raises(EpisodeError) as caught:
        async with deadline("environment.step", 0.01):
            await asyncio.Event().wait()
    assert caught.value.failure == Failure(Boundary.TIMEOUT, "environment.step", "not done within 0.01 s")


async def test_a_timeout_of_the_code_inside_is_not_the_deadline():
    own = TimeoutError("socket")
    with pytest.raises(TimeoutError) as caught:
        async with deadline("environment.step", 60):
            raise own
    assert caught.value is own


async def test_cancelling_a_task_under_a_deadline_stays_a_cancellation():
    async def wait():
        async with deadline("environment.step", 60):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_failure_reads_as_boundary_kind_and_message():
    assert str(Failure(Boundary.TIMEOUT, "environment.step", "late")) == "timeout(environment.step): late"
    assert str(EpisodeError(Boundary.ENGINE, "refused", "too long")) == "engine(refused): too long"


def test_a_configuration_error_is_a_value_error_too():
    assert issubclass(ConfigError, ValueError)


def test_a_failure_names_the_line_that_raised_and_keeps_the_traceback():
    with pytest.raises(EpisodeError) as caught, boundary(Boundary.SCAFFOLD, "run"):
        json.loads("no JSON")
    line = next(number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "no JSON" in text)
    place = f"(line {line} of {__file__}, in test_a_failure_names_the_line_that_raised_and_keeps_the_traceback)"
    assert caught.value.failure.message.endswith(place)
    assert "JSONDecodeError" in caught.value.failure.trace.splitlines()[-1]
    assert "decoder.py" in caught.value.failure.trace


def test_a_long_traceback_keeps_its_end():
    with pytest.raises(EpisodeError) as caught, boundary(Boundary.SCAFFOLD, "run"):
        raise ValueError("x" * 100_000 + "end")
    assert caught.value.failure.trace.startswith("...x")
    assert caught.value.failure.trace.endswith("xend\n")
