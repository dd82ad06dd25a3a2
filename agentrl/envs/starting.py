"""Starts an environment's workers by the Python that is theirs; of one that does not start it says what to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

import agentrl
from agentrl.process.parent import CHILD
from agentrl.process.remote import ChildProcess, ProcessDiedError, RemoteCallError
from agentrl.process.starting import tail
from agentrl.types.environment import EnvironmentDescription
from agentrl.types.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
START_S = 180.0
_SLOW = "what is slow or waits belongs into `create`, not where the module is imported"


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """What the workers of an environment are started with; nothing of the environment is imported for it.

    `environment` is a registered name or ``module:attribute``, which `python` is to find; worker n writes to
    ``LABEL-n.log`` in `logs`.

    Example: ``WorkerCommand("sql", {}, Path("logs"))``.
    """

    environment: str
    options: Mapping[str, Any]
    logs: Path
    python: Path = Path(sys.executable)
    label: str = "environment"
    start_s: float = START_S

    @property
    def remedy(self) -> str:
        """What gives the Python an environment that it lacks."""
        if self.python == Path(sys.executable):
            return "install its package here, or name a Python that has it as environment.interpreter"
        return (
            f"install agentrl and the environment's package there: {self.python} -m pip install "
            f"agentrl=={agentrl.__version__}"
        )


async def start_worker(command: WorkerCommand, number: int) -> ChildProcess:
    """A worker that has imported the environment.

    Waits for: the import. Unblocked by: its end, that of the process, a deadline.

    Raises:
        ConfigError: there is none; names environment and Python, the end of what it wrote, and what to do.
    """
    _check_program(command.python)
    options = msgspec.json.encode(dict(command.options)).decode()
    try:
        worker = await ChildProcess.start(
            f"{command.label}-{number}",
            [*CHILD, "agentrl.envs.worker", command.environment, options],
            command.logs / f"{command.label}-{number}.log",
            python=command.python,
        )
    except OSError as error:
        raise ConfigError(
            f"environment '{command.environment}': no worker could be started by {command.python}: {error}"
        ) from error
    try:
        version = await _ask(command, worker, "wake", str)
        # Calls and answers are encoded by the records of one version.
        if version != agentrl.__version__:
            raise _refusal(command, worker, f"it has agentrl {version} and this run has {agentrl.__version__}")
    except BaseException:
        worker.kill()
        raise
    return worker


async def describe_environment(command: WorkerCommand) -> tuple[EnvironmentDescription, ChildProcess]:
    """What an environment's own process says of it, and that process, which can play episodes from now on.

    Waits for: import and description. Unblocked by: their end, that of the process, a deadline for each.

    Raises:
        ConfigError: it cannot be loaded, refuses its options or has no tasks; says what to do.
    """
    worker = await start_worker(command, 0)
    try:
        return await _ask(command, worker, "describe", EnvironmentDescription), worker
    except BaseException:
        worker.kill()
        raise


async def _ask(command: WorkerCommand, worker: ChildProcess, method: str, result: TypeForm[T]) -> T:
    try:
        return await worker.call(method, result=result, deadline_s=command.start_s)
    except RemoteCallError as error:
        if method != "wake" and error.error == ConfigError.__name__:
            raise ConfigError(error.message) from error
        reason = error.message if error.error == ConfigError.__name__ else f"{error.error}: {error.message}"
        raise _refusal(command, worker, reason) from error
    except ProcessDiedError as error:
        raise _refusal(command, worker, f"its process ended ({worker.how_it_ended()})") from error
    except TimeoutError:
        raise _refusal(command, worker, f"not done within {command.start_s:g} s; {_SLOW}") from None
    except msgspec.ValidationError as error:
        raise _refusal(command, worker, f"its agentrl is not {agentrl.__version__}: {error}") from error


def _refusal(command: WorkerCommand, worker: ChildProcess, reason: str) -> ConfigError:
    last_words = "" if worker.log is None else f"; end of {worker.log}:\n{tail(worker.log)}"
    return ConfigError(
        f"environment '{command.environment}' cannot be loaded by {command.python}: {reason}; {command.remedy}"
        f"{last_words}"
    )


def _check_program(python: Path) -> None:
    if not python.is_file() or not os.access(python, os.X_OK):
        raise ConfigError(f"environment.interpreter: no Python at {python}; give the path of one that has agentrl")
