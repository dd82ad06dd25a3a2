"""Environments in killable worker processes: they may block, hang, crash or leak as they like."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec

from agentrl.envs.starting import WorkerCommand, start_worker
from agentrl.process.remote import ChildProcess, ProcessDiedError, RemoteCallError
from agentrl.types.environment import EnvironmentDescription, Opening, Origin, Score, StepResult
from agentrl.types.errors import Boundary, ConfigError, EpisodeError, Failure, deadline
from agentrl.types.message import Message
from agentrl.types.sandbox import Command, CommandResult
from agentrl.types.task import Split, Task

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
MOST_WARM = 256
"""Workers that wait for an episode, unless a run or a server says how many it has room for."""
_PROGRAM_SLACK_S = 90.0  # behind a program's own deadline, which its sandbox holds; more than the sandbox's client has
_log = logging.getLogger(__name__)


class ProcessEnvironment:
    """An environment in a worker process, for one episode.

    `is_spoiled` is True after a call that did not return: the worker's state is unknown until it answers another.
    """

    def __init__(self, worker: ChildProcess, call_s: float) -> None:
        self._worker, self._call_s = worker, call_s
        self.is_spoiled = False
        self._program: tuple[str, asyncio.Event] | None = None  # the id of the one that runs, and its end

    async def sample(self, split: Split, seed: int, ordinals: Sequence[int]) -> list[Task]:
        """Tasks of the environment, which need no instance."""
        limit_s = self._call_s * len(ordinals)
        return await self._call("sample", split, seed, list(ordinals), result=list[Task], limit_s=limit_s)

    async def create(self, task: Task, origin: Origin | None) -> None:
        """Make the environment."""
        await self._call("create", task, origin, result=type(None))

    async def start(self) -> Opening:
        """The environment's opening."""
        return await self._call("start", result=Opening)

    async def step(self, action: Message) -> StepResult:
        """The environment's reaction."""
        return await self._call("step", action, result=StepResult)

    async def score(self) -> Score:
        """The environment's verdict."""
        return await self._call("score", result=Score)

    async def handle(self) -> str | None:
        """Names the live session."""
        return await self._call("handle", result=str | None)

    async def detach(self) -> None:
        """Leave the session alive."""
        await self._call("detach", result=type(None))

    async def outcome(self, step: int, effect_ids: Sequence[str]) -> StepResult | None:
        """The result of a step that was dispatched to the session."""
        return await self._call("outcome", step, list(effect_ids), result=StepResult | None)

    async def snapshot(self) -> bytes:
        """The whole state."""
        return await self._call("snapshot", result=bytes)

    async def run(self, command: Command, effect_id: str) -> CommandResult:
        """What a scaffold's program gives; one that is given up is stopped."""
        limit_s = command.timeout_s + _PROGRAM_SLACK_S
        self._program = effect_id, asyncio.Event()
        try:
            return await self._call("run", command, effect_id, result=CommandResult, limit_s=limit_s)
        except asyncio.CancelledError:
            await self._worker.tell("stop", effect_id, deadline_s=self._call_s)
            self.is_spoiled = False  # it waits for the sandbox alone, and answers the next call once that has stopped
            raise
        finally:
            self._program[1].set()
            self._program = None

    async def stop(self, effect_id: str) -> None:
        """End such a program. Waits for: its result. Unblocked by: that, or a call's deadline."""
        if self._program is None:
            await self._call("stop", effect_id, result=type(None))
            return
        running, has_ended = self._program
        await self._worker.tell("stop", effect_id, deadline_s=self._call_s)
        if running == effect_id:
            async with deadline("environment.stop", self._call_s):
                await has_ended.wait()

    async def close(self) -> None:
        """Free the environment."""
        await self._call("close", result=type(None))

    async def _call(self, method: str, *arguments: object, result: TypeForm[T], limit_s: float | None = None) -> T:
        limit_s = limit_s or self._call_s
        self.is_spoiled = True
        try:
            value = await self._worker.call(method, *arguments, result=result, deadline_s=limit_s)
        except RemoteCallError as error:
            self.is_spoiled = False
            message = f"{error.error}: {error.message}{error.place}"
            failure = error.failure or Failure(Boundary.ENVIRONMENT, method, message, error.trace)
            raise EpisodeError(failure.boundary, failure.kind, failure.message, failure.trace) from error
        except ProcessDiedError as error:
            raise EpisodeError(Boundary.ENVIRONMENT, "crashed", str(error)) from error
        except TimeoutError:
            raise EpisodeError(
                Boundary.TIMEOUT, f"environment.{method}", f"not done within {limit_s:g} s; worker killed"
            ) from None
        except msgspec.ValidationError as error:
            raise EpisodeError(Boundary.ENVIRONMENT, "answer", f"{method}() returned {error}") from error
        self.is_spoiled = False
        return value


class WarmWorkers:
    """How many workers of all hosts of a process may wait for a next episode: at most `most`.

    Behind one more, the one that has waited for longest is ended, whichever environment it is of.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._ends: OrderedDict[ChildProcess, Callable[[ChildProcess], None]] = OrderedDict()

    def add(self, worker: ChildProcess, end: Callable[[ChildProcess], None]) -> None:
        """A worker waits from now on; `end` ends it."""
        self._ends[worker] = end
        while len(self._ends) > self._most:
            oldest, end_oldest = self._ends.popitem(last=False)
            end_oldest(oldest)

    def remove(self, worker: ChildProcess) -> None:
        """It waits no more."""
        self._ends.pop(worker, None)


class ProcessHost:
    """A pool of worker processes, each with one environment at a time.

    Workers are started on demand and reused for later episodes, as far as `warm` lets them wait; one whose call did not
    return is killed with everything it started.
    """

    def __init__(
        self,
        command: WorkerCommand,
        description: EnvironmentDescription,
        call_s: float,
        first: ChildProcess | None = None,
        warm: WarmWorkers | None = None,
    ) -> None:
        self.description = description
        self._command, self._call_s = command, call_s
        self._warm = warm or WarmWorkers(MOST_WARM)
        self._idle: list[ChildProcess] = []
        self._all: set[ChildProcess] = set()
        self._numbers = itertools.count(0 if first is None else 1)
        self._sampling = asyncio.Lock()
        if first is not None:
            self._all.add(first)
            self._keep_warm(first)

    async def sample(self, split: Split, seed: int, ordinals: Sequence[int]) -> list[Task]:
        """Tasks of a split in a run's order, made by a worker, and if that dies by another one. Raises EpisodeError."""
        async with self._sampling:
            try:
                return await self._sample(split, seed, ordinals)
            except EpisodeError as error:
                if error.failure.kind != "crashed":
                    raise
                _log.warning("tasks are sampled once more: %s", error)
                return await self._sample(split, seed, ordinals)

    async def _sample(self, split: Split, seed: int, ordinals: Sequence[int]) -> list[Task]:
        worker = self._pop_idle() or await self._start_worker()
        environment = ProcessEnvironment(worker, self._call_s)
        try:
            return await environment.sample(split, seed, ordinals)
        finally:
            await self._put_back(worker, environment)

    @asynccontextmanager
    async def open(self, task: Task, origin: Origin | None = None) -> AsyncIterator[ProcessEnvironment]:
        """An environment for one episode. Raises EpisodeError if it cannot be made."""
        worker = self._pop_idle() or await self._start_worker()
        environment = ProcessEnvironment(worker, self._call_s)
        try:
            await environment.create(task, origin)
            yield environment
        finally:
            await self._put_back(worker, environment)

    async def close(self) -> None:
        """Kill all workers; safe to call twice."""
        for worker in self._all:
            self._warm.remove(worker)
            worker.kill()
        self._all.clear()
        self._idle.clear()

    def _pop_idle(self) -> ChildProcess | None:
        """A worker that is free and lives; one that died between episodes costs no episode."""
        while self._idle:
            worker = self._idle.pop()
            self._warm.remove(worker)
            if worker.is_alive:
                return worker
            self._discard(worker)
        return None

    async def _start_worker(self) -> ChildProcess:
        try:
            worker = await start_worker(self._command, next(self._numbers))
        except ConfigError as error:
            raise EpisodeError(Boundary.ENVIRONMENT, "worker", str(error)) from error
        self._all.add(worker)
        return worker

    async def _put_back(self, worker: ChildProcess, environment: ProcessEnvironment) -> None:
        """Keep a worker that answers its close; kill any other. The episode's outcome stands either way.

        Where the episode was cut off in the midst of a call, a live session is closed behind that call's end.
        """
        task = asyncio.current_task()
        is_cut_off = task is not None and task.cancelling() > 0
        if not environment.is_spoiled or (is_cut_off and self.description.recovery.has_handles):
            try:
                await environment.close()
                self._keep_warm(worker)
                return
            except EpisodeError as error:
                _log.warning("environment could not be closed, its worker is killed: %s", error)
            except asyncio.CancelledError:
                self._discard(worker)
                raise
        self._discard(worker)

    def _keep_warm(self, worker: ChildProcess) -> None:
        self._idle.append(worker)
        self._warm.add(worker, self._end_idle)

    def _end_idle(self, worker: ChildProcess) -> None:
        self._idle.remove(worker)
        self._discard(worker)

    def _discard(self, worker: ChildProcess) -> None:
        worker.kill()
        self._all.discard(worker)
