"""Lets a run go on: by itself, once it has lost what it cannot do without, and when its command is called again."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.recorder import RunObserver
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.orchestration.shutdown import RunSummary
from agentrl.process.place import PlaceLostError
from agentrl.types.errors import AgentRLError, ConfigError, EnginesLostError, PublishError, TrainerLostError

_log = logging.getLogger(__name__)
_LOSSES = (TrainerLostError, EnginesLostError, PlaceLostError, PublishError)
"""What another start of all processes may mend. Anything else would come again, or needs a person."""


async def going_on(
    run: RunDirectory,
    max_resumes: int,
    observer: RunObserver,
    attempt: Callable[[], Awaitable[RunSummary]],
    is_stopping: Callable[[], bool],
) -> RunSummary:
    """The end of the first attempt that comes to one; each begins where its predecessor's checkpoint and journal end.

    An attempt whose processes were lost is followed by another, `max_resumes` times without a step in between: what
    kills the same step again and again is no accident. None follows where the run `is_stopping`.

    Waits for: the attempts. Unblocked by: their ends.

    Raises:
        AgentRLError: the run failed by something else, or once too often.
    """
    losses, reached = 0, _steps(run)
    while True:
        try:
            return await attempt()
        except _LOSSES as error:
            steps = _steps(run)
            losses, reached = (1 if steps > reached else losses + 1), max(steps, reached)
            if losses > max_resumes or is_stopping():
                raise _as_last(error, losses, max_resumes) from error
            reason = str(error).partition("\n")[0]
            _log.warning("%s; the run goes on from its last checkpoint (%d of %d)", reason, losses, max_resumes)
            observer.on_phase(f"{reason}; going on from the last checkpoint ({losses} of {max_resumes})")


def _steps(run: RunDirectory) -> int:
    """Steps that the run's policies have made together, as its state says; those behind a checkpoint are redone."""
    state = run.state()
    return sum(version.step for version in state.versions.values()) if state is not None else 0


def _as_last(error: AgentRLError, losses: int, max_resumes: int) -> AgentRLError:
    if not max_resumes:
        return error
    return type(error)(
        f"{error}\nThis was loss {losses} without a step in between (runtime.max_resumes = {max_resumes})"
    )


def begun_run(config: RunConfig) -> RunDirectory | None:
    """The folder without a number of a configuration's run; None if it has not begun.

    Raises:
        ConfigError: it has begun with another configuration; names a value that differs.
    """
    run = RunDirectory((config.runs_folder / RunDirectory.name_of(config)).absolute())
    if not run.has_begun:
        return None
    other = _difference(run.config().model_dump(mode="json"), config.model_dump(mode="json"))
    if other:
        raise ConfigError(
            f"{run.path} was started with another {other}; go on with what it has by `agentrl resume {run.path}`, or "
            "give this run another name"
        )
    return run


def _difference(known: object, given: object, key: str = "") -> str:
    """The path of the first value that differs between two tables; empty if none does. Example: ``buffer.forks``."""
    if not isinstance(known, dict) or not isinstance(given, dict):
        return "" if known == given else key
    inner = (_difference(known.get(k), given.get(k), f"{key}.{k}".lstrip(".")) for k in {**known, **given})
    return next(filter(None, inner), "")
