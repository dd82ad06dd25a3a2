"""A rollout worker in a process of its own: ``python -m agentrl.orchestration.worker_process MARK_FD FD``.

It builds scaffold, environments and chat formats from the run's configuration, writes a journal of its own, and plays
with the same runner as the run's process does. Engines it never speaks to: its requests go to the driver and through
the driver's router. Whether a reply may pass is decided by what each engine was proven to hold since the request was
sent, and the publisher that moves these proofs lives in the driver; so there is one fence for all workers, and none
that could lag behind.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.config.base import parse_config
from agentrl.gateway.starting import LazyGateway
from agentrl.journal.claim import Claim
from agentrl.journal.writer import JournalWriter
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.players import build_hosts, build_runners
from agentrl.orchestration.program_check import check_programs
from agentrl.process.channel import Channel
from agentrl.process.loop import run_async
from agentrl.process.remote import RemoteCallError
from agentrl.process.running_mark import RunningMark
from agentrl.protocols import EnvironmentHost
from agentrl.rollouts.durable import WorkerJournal
from agentrl.rollouts.episode_log import NoJournal
from agentrl.rollouts.recorded_replies import Generating
from agentrl.rollouts.worker import LocalWorker
from agentrl.telemetry.opening import open_span_sink
from agentrl.telemetry.spans import SpanSink
from agentrl.tokens.chat import ChatFormat
from agentrl.types.environment import EnvironmentDescription
from agentrl.types.episode import Episode
from agentrl.types.errors import EpisodeError
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

STACK_SIGNAL = signal.SIGUSR1
"""Upon it a worker writes the stacks of its threads to its log, whatever it is doing."""
NOTES: dict[type, str] = {
    TurnPlayed: "turn_played",
    PlaceFreed: "place_freed",
    EpisodeFinished: "episode_finished",
    EpisodeLeft: "episode_left",
    WorkerFailed: "worker_failed",
}
"""The method of the driver's end that takes each event."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker process is made of. `config` is the run's as JSON; without a `journal` nothing is on record.

    `environments` are described, so that no worker has to ask. Spans are written below the folder `run`.
    """

    name: str
    config: str
    logs: str
    beat_s: float
    environments: dict[str, EnvironmentDescription]
    run: str
    journal: str | None = None
    claim: int = 0


class RemoteRouter:
    """The driver's router of a policy's engines."""

    def __init__(self, channel: Channel, policy: str, deadline_s: float) -> None:
        self._channel, self._policy, self._deadline_s = channel, policy, deadline_s

    async def generate(self, request: GenerationRequest) -> Generation:
        """Continue a prompt. Raises EpisodeError."""
        # Whoever generates from ids needs no text, and that of a long conversation would cross with every turn.
        request = replace(request, conversation=())
        try:
            return await self._channel.call(
                "generate", self._policy, request, result=Generation, deadline_s=self._deadline_s
            )
        except RemoteCallError as error:
            if error.failure is None:
                raise
            failure = error.failure
            raise EpisodeError(failure.boundary, failure.kind, failure.message, failure.trace) from error


class WorkerServer:
    """What the driver calls in a worker process."""

    def __init__(self, mark: RunningMark) -> None:
        self._mark = mark
        self._channel: Channel
        self._worker: LocalWorker
        self._hosts: dict[str, EnvironmentHost] = {}
        self._journal: WorkerJournal | None = None
        self._spans: SpanSink | None = None
        self._loops: list[asyncio.Task[None]] = []

    async def serve(self, connection: socket.socket) -> None:
        """Waits for: the driver to hang up. Unblocked by: that; calls are answered meanwhile."""
        self._channel = await Channel.open("driver", connection, self)
        await self._channel.ended()

    async def set_up(self, spec: WorkerSpec) -> None:
        """Build everything. Raises ConfigError."""
        config, logs = parse_config(RunConfig, json.loads(spec.config), spec.name), Path(spec.logs)
        if spec.journal is not None:
            claim = Claim(Path(spec.journal), spec.claim)
            writer = JournalWriter(claim.folder, spec.name, check_right=claim.check, gather_s=config.journal.gather_s)
            self._journal = WorkerJournal(writer)
        self._hosts = await build_hosts(config, logs, known=spec.environments)
        await check_programs(config, self._hosts)
        chats = {name: ChatFormat.load(policy.model, policy.chat) for name, policy in config.policies.items()}
        gateway, journal = LazyGateway(), self._journal or NoJournal()
        runners = build_runners(config, self._engines(config, chats), chats, self._hosts, journal, gateway)
        self._spans = open_span_sink(config.telemetry, Path(spec.run), spec.name)
        self._worker = LocalWorker(
            spec.name, runners, self._journal, self._end_session, gateway, self._mark, self._spans
        )
        loop = asyncio.get_running_loop()
        self._loops = [loop.create_task(self._tell_events()), loop.create_task(self._beat_on(spec.beat_s))]

    async def assign(self, assignment: Assignment) -> None:
        """Play an episode."""
        await self._worker.assign(assignment)

    def park(self) -> None:
        """Leave every episode at its next safe place."""
        self._worker.park()

    def end(self) -> None:
        """Nobody will resume what is cut off from now on."""
        self._worker.end()

    async def cut_off(self, episode_id: str) -> Episode | None:
        """Stop an episode; returns it as it stands."""
        return await self._worker.cut_off(episode_id)

    async def close(self) -> None:
        """Cut everything off, and let what was noted become durable."""
        await self._worker.close()
        await asyncio.gather(*(host.close() for host in self._hosts.values()))
        if self._journal is not None:
            await self._journal.writer.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        self._beat()
        for task in self._loops:
            task.cancel()

    def _engines(self, config: RunConfig, chats: Mapping[str, ChatFormat]) -> Mapping[str, Generating]:
        """What continues the prompts of each policy: its engines, by way of the driver."""
        longest_s = max(config.limits_of(name).total_s for name in config.environments)
        return {name: RemoteRouter(self._channel, name, longest_s) for name in chats}

    async def _tell_events(self) -> None:
        """Waits for: events, each of which is told. Ends by cancellation."""
        while True:
            event: WorkerEvent = await self._worker.next_event()
            if isinstance(event, EpisodeFinished):
                # A checkpoint that knows the episode must know the journal up to its end.
                self._beat()
            self._channel.note(NOTES[type(event)], event)

    async def _beat_on(self, interval_s: float) -> None:
        """Show that the loop goes round. Ends by cancellation."""
        while True:
            self._beat()
            await asyncio.sleep(interval_s)

    def _beat(self) -> None:
        self._channel.note("beat", self._journal.writer.newest if self._journal is not None else None)

    def _end_session(self, policy: str, session: str) -> None:
        self._channel.note("end_session", policy, session)


def main() -> None:
    """Entry of the process."""
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    mark, connection = map(int, sys.argv[1:])
    run_async(WorkerServer(RunningMark(mark)).serve(socket.socket(fileno=connection)))


if __name__ == "__main__":
    main()
