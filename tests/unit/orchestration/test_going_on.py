from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.going_on import begun_run, going_on
from agentrl.orchestration.recorder import SilentObserver
from agentrl.orchestration.run_directory import RunDirectory, RunState, RunStatus
from agentrl.orchestration.shutdown import RunSummary
from agentrl.process.place import PlaceLostError
from agentrl.types.errors import (
    AgentRLError,
    ConfigError,
    EnginesLostError,
    PublishError,
    StorageError,
    TrainerError,
    TrainerLostError,
)
from agentrl.types.version import PolicyVersion
from tests.unit.orchestration.test_run_directory import config


class Attempts:
    """Each reaches a step and then ends by an error; the last comes to its end."""

    def __init__(self, run: RunDirectory, *ends: tuple[int, AgentRLError | None]) -> None:
        self._run, self._ends, self.made = run, list(ends), 0

    async def __call__(self) -> RunSummary:
        step, error = self._ends[self.made]
        self.made += 1
        versions = {"main": PolicyVersion(0, step)}
        self._run.write_state(RunState(RunStatus.FAILED, versions))
        if error is not None:
            raise error
        return RunSummary(self._run.path, RunStatus.FINISHED, versions, (), 0.0, 0, 0, 0, {})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(config(tmp_path))


async def end_of(
    run: RunDirectory, attempt: Callable[[], Awaitable[RunSummary]], max_resumes: int, is_stopping: bool = False
) -> RunSummary:
    return await going_on(run, max_resumes, SilentObserver(), attempt, lambda: is_stopping)


@pytest.mark.parametrize(
    "loss", [TrainerLostError("a"), EnginesLostError("b"), PlaceLostError("c"), PublishError("d")], ids=str
)
async def test_a_run_that_lost_its_processes_is_tried_again(run: RunDirectory, loss: AgentRLError) -> None:
    attempts = Attempts(run, (3, loss), (5, None))
    assert (await end_of(run, attempts, 1)).version == PolicyVersion(0, 5)
    assert attempts.made == 2


@pytest.mark.parametrize(
    "error", [TrainerError("the gate failed"), ConfigError("x"), StorageError("full"), AgentRLError("y")], ids=str
)
async def test_what_would_come_again_ends_the_run_at_once(run: RunDirectory, error: AgentRLError) -> None:
    attempts = Attempts(run, (3, error), (5, None))
    with pytest.raises(type(error)) as raised:
        await end_of(run, attempts, 3)
    assert raised.value is error
    assert attempts.made == 1


async def test_losses_without_a_step_in_between_are_bounded_and_a_step_counts_anew(run: RunDirectory) -> None:
    loss = TrainerLostError("signal 9")
    attempts = Attempts(run, (0, loss), (0, loss), (4, loss), (4, loss), (4, loss), (9, None))
    with pytest.raises(TrainerLostError, match=r"signal 9\nThis was loss 3 without a step.*max_resumes = 2"):
        await end_of(run, attempts, 2)
    assert attempts.made == 5, "two at step 0 are allowed, and two more at step 4"


async def test_without_resumes_the_error_is_the_run_s_own(run: RunDirectory) -> None:
    loss = EnginesLostError("no engine is left")
    with pytest.raises(EnginesLostError) as raised:
        await end_of(run, Attempts(run, (2, loss)), 0)
    assert raised.value is loss


async def test_a_run_that_was_asked_to_stop_does_not_go_on(run: RunDirectory) -> None:
    attempts = Attempts(run, (3, TrainerLostError("a")), (5, None))
    with pytest.raises(TrainerLostError):
        await end_of(run, attempts, 3, is_stopping=True)
    assert attempts.made == 1


def test_the_folder_of_a_run_that_has_begun_is_found_by_its_configuration(tmp_path: Path) -> None:
    assert begun_run(config(tmp_path)) is None
    run = RunDirectory.create(config(tmp_path))
    assert begun_run(config(tmp_path)) is None, "nothing has been started: a start makes a folder of its own"
    run.mark()
    found = begun_run(config(tmp_path))
    assert found is not None
    assert found.path == run.path


def test_a_folder_of_another_configuration_is_named_with_the_value_that_differs(tmp_path: Path) -> None:
    RunDirectory.create(config(tmp_path)).mark()
    values = config(tmp_path).model_dump()
    values["buffer"]["max_staleness"] = 7
    with pytest.raises(ConfigError, match=r"demo-seed7 was started with another buffer\.max_staleness; .*another name"):
        begun_run(RunConfig.model_validate(values))
