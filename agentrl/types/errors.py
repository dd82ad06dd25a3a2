"""What can go wrong, named by the boundary that it crossed.

Two kinds. An `EpisodeError` ends one episode: a worker turns it into a `Failure` in the record, and
the run goes on. Every other `AgentRLError` ends the run with a message that says what happened, what
it means and what to do. Foreign exceptions become ours in `boundary` and nowhere else.
"""

from __future__ import annotations

import asyncio
import sysconfig
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_MAX_TRACE = 8000  # characters
_OURS = f"{Path(__file__).parents[1]}/"
_STDLIB = f"{sysconfig.get_path('stdlib')}/"


class Boundary(StrEnum):
    """Where an episode's failure crossed into the platform."""

    ENGINE = "engine"
    SCAFFOLD = "scaffold"
    ENVIRONMENT = "environment"
    SANDBOX = "sandbox"
    SCORER = "scorer"
    CONTRACT = "contract"
    TIMEOUT = "timeout"
    BUDGET = "budget"
    CANCELLED = "cancelled"


CUT_OFF = "cut_off"
"""Kind of a failure that is nobody's fault: the episode ended with the worker that played it, and cannot go on."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an episode has no outcome; `kind` groups failures in counters, `message` is for a person.

    `trace` is the traceback of what a plugin raised, wherever it ran; empty for what the platform itself found.

    Example: ``Failure(Boundary.TIMEOUT, "environment.step", "no result within 5.0 s")``.
    """

    boundary: Boundary
    kind: str
    message: str
    trace: str = ""

    def __str__(self) -> str:
        return f"{self.boundary}({self.kind}): {self.message}"


class AgentRLError(Exception):
    """Base of everything that the platform raises on purpose."""


class ConfigError(AgentRLError, ValueError):
    """A configuration, a file or an argument that cannot be used as given."""


class EngineError(AgentRLError):
    """No engine is left to generate with, or one answered what the protocol does not allow."""


class EngineRefusedError(EngineError):
    """An engine answered a control call with an error; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class EngineRestartedError(EngineError):
    """An engine answers that holds nothing of this run: another process has taken its place."""


class EnginesLostError(EngineError):
    """All engines of a policy are gone, or one that nothing replaces. A run that is resumed starts them anew."""


class EngineTakenError(AgentRLError):
    """An engine belongs to another run. It ends the run: nothing that the engine does is this run's any more."""


class TrainerError(AgentRLError):
    """A trainer rank died, hung, or disagrees with the engine about the policy."""


class TrainerLostError(TrainerError):
    """A trainer rank died or hung. A run that is resumed goes on from its checkpoint."""


class PublishError(AgentRLError):
    """New weights could not be brought to any engine; the message names phase and engine."""


class StorageError(AgentRLError):
    """The run directory could not be written or read: disk full, file missing, block corrupt."""


class WorkerLostError(AgentRLError):
    """The process of a rollout worker is gone: `kind` is ``crashed`` or ``hung``. Its episodes go on elsewhere.

    `running` is the name of the episode that it was running when it ended or hung, if it was running one.
    """

    def __init__(self, kind: str, message: str, running: str | None = None) -> None:
        super().__init__(message)
        self.kind, self.running = kind, running


class JobError(AgentRLError):
    """A job system cannot be reached, or refuses; the message says which, and what to do."""


class RunStoppedError(AgentRLError):
    """A run was asked to stop before it had begun to train; nothing of it is lost."""


class StalledError(AgentRLError):
    """The run cannot make progress; the message says what it waited for and why that will not come."""


class EpisodeError(AgentRLError):
    """Ends one episode; becomes its `Failure`."""

    def __init__(self, boundary: Boundary, kind: str, message: str, trace: str = "") -> None:
        super().__init__(f"{boundary}({kind}): {message}")
        self.failure = Failure(boundary, kind, message, trace)


class EngineBusyError(EpisodeError):
    """An engine under load wants a request later; nothing of it was computed.

    Example: ``EngineBusyError("main-0: HTTP 503", retry_after_s=2.0)``.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(Boundary.ENGINE, "busy", message)
        self.retry_after_s = retry_after_s


ERRORS_BY_NAME: dict[str, type[AgentRLError]] = {
    kind.__name__: kind for kind in (ConfigError, StorageError, TrainerError)
}
"""Those of our errors that a child process may raise for its parent: they mean the same there."""


@contextmanager
def boundary(where: Boundary, kind: str, meaning: str = "") -> Iterator[None]:
    """Turn whatever foreign code raises inside into an `EpisodeError` of this boundary.

    Our own errors pass unchanged, and so does cancellation. A plugin's ``sys.exit`` ends its episode and nothing else.
    `meaning` says to a person what the error means.
    """
    try:
        yield
    except AgentRLError:
        raise
    except (Exception, SystemExit) as error:
        message = f"{meaning}{': ' if meaning else ''}{type(error).__name__}: {error}{place_of(error)}"
        raise EpisodeError(where, kind, message, trace_of(error)) from error


def place_of(error: BaseException) -> str:
    """Where a plugin's code raised, as words behind a message: the innermost line of it.

    Example: `` (line 41 of /home/me/game/environment.py, in step)``; empty if there is none.
    """
    place = place_in(traceback.extract_tb(error.__traceback__))
    return f" ({place})" if place else ""


def place_in(stack: traceback.StackSummary) -> str:
    """The innermost line of a plugin's code in a stack, as words; empty if there is none."""
    frames = [frame for frame in stack if not _is_of_python_or_us(frame.filename)]
    written_here = [frame for frame in frames if "-packages/" not in frame.filename]
    # An installed plugin looks like the libraries that it calls, but comes before them.
    found = written_here[-1:] or frames[:1]
    return "".join(f"line {frame.lineno} of {frame.filename}, in {frame.name}" for frame in found)


def _is_of_python_or_us(file: str) -> bool:
    return file.startswith(("<", _OURS)) or (file.startswith(_STDLIB) and "-packages/" not in file)


def trace_of(error: BaseException) -> str:
    """The traceback as Python prints it; of a long one the end, which says what was raised and where."""
    text = "".join(traceback.format_exception(error))
    return text if len(text) <= _MAX_TRACE else f"...{text[-_MAX_TRACE:]}"


@asynccontextmanager
async def deadline(stage: str, seconds: float) -> AsyncIterator[None]:
    """Bound what happens inside; a breach is an `EpisodeError` of the timeout boundary naming the stage."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise EpisodeError(Boundary.TIMEOUT, stage, f"not done within {seconds:g} s") from error
