"""The driver's side of a worker process: starts it, takes its events and requests, and kills one that is silent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from agentrl.journal.durable_offsets import SegmentEnd
from agentrl.orchestration.worker_process import STACK_SIGNAL, WorkerSpec
from agentrl.process.channel import Channel, ChannelClosedError
from agentrl.process.parent import CHILD
from agentrl.process.place import Place, PlacedProcess, PlaceLostError, ProcessLaunch
from agentrl.process.remote import RemoteCallError
from agentrl.process.starting import tail
from agentrl.protocols import RolloutWorker
from agentrl.rollouts.recorded_replies import Generating
from agentrl.rollouts.worker import SessionEnd
from agentrl.types.episode import Episode
from agentrl.types.errors import ERRORS_BY_NAME, AgentRLError, WorkerLostError
from agentrl.types.generation import Generation, GenerationRequest
from agentrl.types.rollout import (
    Assignment,
    EpisodeFinished,
    EpisodeLeft,
    PlaceFreed,
    TurnPlayed,
    WorkerEvent,
    WorkerFailed,
)

START_S = 120.0
_CALL_S = 30.0
_EXIT_S = 5.0
_DUMP_S = 0.5
_TICKS = 4
_MODULE = "agentrl.orchestration.worker_process"


class DriverEnd:
    """What a worker process calls in the driver: engines through their routers, and notes of what happens."""

    def __init__(
        self,
        engines: Mapping[str, Generating],
        end_session: SessionEnd,
        on_beat: Callable[[SegmentEnd | None], None],
    ) -> None:
        self._engines, self._end_session, self._on_beat = engines, end_session, on_beat
        self.events: asyncio.Queue[WorkerEvent | WorkerLostError] = asyncio.Queue()
        self.has_beaten = False

    async def generate(self, policy: str, request: GenerationRequest) -> Generation:
        """Continue a prompt, by the router of the policy's engines."""
        return await self._engines[policy].generate(request)

    def end_session(self, policy: str, session: str) -> None:
        """A session asks for nothing more."""
        self._end_session(policy, session)

    def beat(self, end: SegmentEnd | None) -> None:
        """The worker's loop goes round; its journal is durable up to there."""
        self.has_beaten = True
        self._on_beat(end)

    def turn_played(self, event: TurnPlayed) -> None:
        """A reply is complete."""
        self.events.put_nowait(event)

    def place_freed(self, event: PlaceFreed) -> None:
        """An episode generates no more."""
        self.events.put_nowait(event)

    def episode_finished(self, event: EpisodeFinished) -> None:
        """An episode is over."""
        self.events.put_nowait(event)

    def episode_left(self, event: EpisodeLeft) -> None:
        """An episode is parked."""
        self.events.put_nowait(event)

    def worker_failed(self, event: WorkerFailed) -> None:
        """The worker cannot go on."""
        self.events.put_nowait(event)


class WorkerProcess(RolloutWorker):
    """A rollout worker in a process of its own.

    It is lost once its process has ended, or once its event loop has shown no sign of life for `silence_s`: then its
    stacks are written to its log and it is killed. `next_event` says so only when nothing of the process is left that
    could act or write.
    """

    def __init__(
        self, name: str, node: str, process: PlacedProcess, driver: DriverEnd, log: Path, silence_s: float
    ) -> None:
        self.name, self.node, self.log = name, node, log
        self._process, self._driver, self._silence_s = process, driver, silence_s
        self._channel: Channel
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, spec: WorkerSpec, driver: DriverEnd, log: Path, silence_s: float, place: Place
    ) -> WorkerProcess:
        """Start a process at a place and wait until it can play.

        Raises:
            WorkerLostError: it could not be started, ended, or was not ready in time.
            ConfigError: scaffold, environment or chat format cannot be made.
        """
        launch = ProcessLaunch(spec.name, (*CHILD, _MODULE), str(log.absolute()), has_mark=True)
        try:
            process = await place.start(launch)
        except (OSError, PlaceLostError) as error:
            raise WorkerLostError("crashed", f"{spec.name} could not be started: {error}") from error
        worker = cls(spec.name, place.node, process, driver, log, silence_s)
        try:
            worker._channel = await Channel.open(spec.name, process.connection, driver)
            await worker._channel.call("set_up", spec, result=type(None), deadline_s=START_S)
        except RemoteCallError as error:
            await worker._kill()
            raise ERRORS_BY_NAME.get(error.error or "", AgentRLError)(f"{spec.name}: {error.message}") from error
        except (ChannelClosedError, TimeoutError) as error:
            await worker._kill()
            kind = "hung" if isinstance(error, TimeoutError) else "crashed"
            raise WorkerLostError(kind, worker._describe(f"was not ready: {error}")) from error
        except asyncio.CancelledError:
            await worker._kill()
            raise
        worker._watching = asyncio.create_task(worker._watch(), name=f"watch-{spec.name}")
        return worker

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def assign(self, assignment: Assignment) -> None:
        """Play an episode; one whose process is gone by now is lost with it."""
        self._channel.note("assign", assignment)

    async def next_event(self) -> WorkerEvent:
        """Waits for: the next event. Unblocked by: it, or the loss of the process. Raises WorkerLostError then."""
        event = await self._driver.events.get()
        if isinstance(event, WorkerLostError):
            raise event
        return event

    def park(self) -> None:
        """Leave every episode at its next safe place."""
        self._channel.note("park")

    def end(self) -> None:
        """Nobody will resume what is cut off from now on."""
        self._channel.note("end")

    async def cut_off(self, episode_id: str) -> Episode | None:
        """Stop an episode; returns it as it stands, or None if the worker does not say within its deadline."""
        with contextlib.suppress(ChannelClosedError, RemoteCallError, TimeoutError):
            return await self._channel.call("cut_off", episode_id, result=Episode | None, deadline_s=_CALL_S)
        return None

    async def close(self) -> None:
        """Let the worker sync its journal, then end its process; safe to call twice."""
        if self._watching is not None:
            self._watching.cancel()
        with contextlib.suppress(ChannelClosedError, RemoteCallError, TimeoutError):
            await self._channel.call("close", result=type(None), deadline_s=_CALL_S)
        self._channel.close()
        await self._wait_for_end()
        await self._kill()

    async def _watch(self) -> None:
        """Waits for: the end of the process, or its silence. Unblocked by: either; tells of the loss then."""
        if await self._is_silent():
            self._process.signal(STACK_SIGNAL)
            await asyncio.sleep(_DUMP_S)
            kind = "hung"
            what = f"was silent for {self._silence_s:g} s and was killed; the stacks of its threads are in its log"
        else:
            # A process that dies closes its socket before its exit code can be had.
            await self._wait_for_end()
            kind, what = "crashed", self._process.how_it_ended()
        running = await self._process.running()
        await self._kill()
        if running is not None:
            what = f"{what}, while it ran episode {running}"
        self._driver.events.put_nowait(WorkerLostError(kind, self._describe(what), running))

    async def _is_silent(self) -> bool:
        """True once no beat came for so many ticks of this loop; False at the end of the process.

        Ticks and no clock, since beats wait too while this process stands still itself.
        """
        silent = 0
        while silent <= _TICKS:
            self._driver.has_beaten = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._silence_s / _TICKS):
                    await self._channel.ended()
                    return False
            silent = 0 if self._driver.has_beaten else silent + 1
        return True

    async def _wait_for_end(self) -> None:
        """Waits for: the process to end by itself. Unblocked by: its end, or a deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_S):
                await self._process.wait()

    async def _kill(self) -> None:
        """Waits for: the end of the process and of what it started, which a disk alone can delay."""
        await self._process.end()
        self._channel.close()

    def _describe(self, what: str) -> str:
        return f"process {self.name}: {what}; end of {self.log}:\n{tail(self.log)}"
