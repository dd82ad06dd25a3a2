"""Chooses where a run's episodes are played, and builds the workers that play them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl import registry
from agentrl.gateway.starting import LazyGateway
from agentrl.inference.router import EngineRouter
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.players import build_runners
from agentrl.orchestration.run_journal import RunJournal
from agentrl.orchestration.worker_handle import DriverEnd, WorkerProcess
from agentrl.orchestration.worker_journals import WorkerJournals
from agentrl.orchestration.worker_pool import TurnListener, WorkerPool
from agentrl.orchestration.worker_process import WorkerSpec
from agentrl.process.place import Place, PlaceLostError, Places, Role
from agentrl.protocols import EnvironmentHost, RolloutWorker
from agentrl.rollouts.episode_log import NoJournal
from agentrl.rollouts.recorded_replies import Generating
from agentrl.rollouts.worker import LocalWorker, SessionEnd
from agentrl.telemetry.run_traces import RunTraces
from agentrl.tokens.chat import ChatFormat
from agentrl.types.errors import WorkerLostError

LOCAL = "worker-0"
_BEATS_OF_A_SILENCE = 8
_LONGEST_BEAT_S = 5.0


def num_processes(config: RunConfig) -> int:
    """Processes that play a run's episodes; 0 where the run's own does. Raises ConfigError for unknown scaffolds."""
    if config.rollout.workers != "auto":
        return config.rollout.workers
    scaffolds = {section.scaffold.name for section in config.environments.values()}
    return 0 if all(registry.is_shipped(registry.SCAFFOLDS, name) for name in scaffolds) else 1


def build_pool(
    config: RunConfig,
    logs: Path,
    routers: Mapping[str, EngineRouter],
    chats: Mapping[str, ChatFormat],
    hosts: Mapping[str, EnvironmentHost],
    journal: RunJournal,
    places: Places,
    on_turn: TurnListener | None = None,
    traces: RunTraces | None = None,
) -> WorkerPool:
    """The workers of a run's training episodes: processes, or this one. Raises ConfigError.

    A scaffold that processes play is not even imported here.
    """
    journals, count, traces = journal.workers, num_processes(config), traces or RunTraces()

    def end_session(policy: str, session: str) -> None:
        routers[policy].end_session(session)

    if count > 0:
        starts = WorkerStarts(Role.WORKER, "worker-{}", config, logs, hosts, routers, end_session, journals, places)
        needed = 1 if places.is_elastic else count
        attempts = config.rollout.max_attempts
        return WorkerPool(starts.start, count, journals, attempts, end_session, on_turn, needed, traces)
    gateway = LazyGateway()
    runners = build_runners(config, routers, chats, hosts, journal.rollouts, gateway)
    worker = LocalWorker(LOCAL, runners, journals.own, end_session, gateway, spans=traces.sink)
    return local_pool(worker, journals, end_session, on_turn, traces)


def build_evaluation_pool(
    config: RunConfig,
    logs: Path,
    engines: Mapping[str, Generating],
    chats: Mapping[str, ChatFormat],
    hosts: Mapping[str, EnvironmentHost],
    places: Places,
) -> WorkerPool:
    """What plays a run's evaluations: a process where training episodes have some, else this one. Raises ConfigError.

    Nothing is on record: an episode whose worker is lost begins anew in the next.
    """
    journals = WorkerJournals()
    if num_processes(config) > 0:
        starts = WorkerStarts(
            Role.EVALUATOR, "evaluator", config, logs, hosts, engines, forget_nothing, journals, places
        )
        return WorkerPool(starts.start, 1, journals, config.rollout.max_attempts, forget_nothing)
    gateway = LazyGateway()
    runners = build_runners(config, engines, chats, hosts, NoJournal(), gateway)
    return local_pool(LocalWorker("evaluator", runners, None, forget_nothing, gateway), journals, forget_nothing)


def local_pool(
    worker: LocalWorker,
    journals: WorkerJournals,
    end_session: SessionEnd,
    on_turn: TurnListener | None = None,
    traces: RunTraces | None = None,
) -> WorkerPool:
    """One worker on this process's event loop, which cannot be lost."""

    async def start(place: int) -> RolloutWorker:
        return worker

    return WorkerPool(start, 1, journals, 0, end_session, on_turn, traces=traces)


def forget_nothing(policy: str, session: str) -> None:
    """A single engine keeps no homes of sessions."""


@dataclass(slots=True)
class WorkerStarts:
    """Starts the workers of a role as processes, each with a journal and a folder of logs of its own.

    `name` is of all of them, with their number in its braces. One that replaces a lost one is started at its place, so
    that it finds what that had left on the node, and elsewhere only if the place is gone.
    """

    role: Role
    name: str
    config: RunConfig
    logs: Path
    hosts: Mapping[str, EnvironmentHost]
    engines: Mapping[str, Generating]
    end_session: SessionEnd
    journals: WorkerJournals
    places: Places
    _taken: dict[int, Place] = field(default_factory=dict)

    async def start(self, number: int) -> WorkerProcess:
        """The worker of a number, counted from 0. Raises WorkerLostError or ConfigError."""
        name = self.name.format(number + 1)
        try:
            if number not in self._taken:
                self._taken[number] = await self.places.take(self.role, name, team=self.role)
            return await self._start_at(self._taken[number], name)
        except BaseException as error:
            if number in self._taken:
                await self._taken.pop(number).close()
            if isinstance(error, PlaceLostError):
                raise WorkerLostError("crashed", f"{name} could not be started: {error}") from error
            raise

    async def _start_at(self, place: Place, name: str) -> WorkerProcess:
        """Raises PlaceLostError, WorkerLostError or ConfigError."""
        silence_s, claim = self.config.rollout.worker_silence_s, self.journals.claim
        folder = self.logs / name
        folder.mkdir(exist_ok=True)
        spec = WorkerSpec(
            name,
            self.config.model_dump_json(),
            str(folder),
            beat_s=min(silence_s / _BEATS_OF_A_SILENCE, _LONGEST_BEAT_S),
            environments={name: host.description for name, host in self.hosts.items()},
            run=str(self.logs.parent),
            journal=str(claim.folder) if claim is not None else None,
            claim=claim.token if claim is not None else 0,
        )
        self.journals.begin(name)
        driver = DriverEnd(self.engines, self.end_session, self.journals.note_end)
        log = self.logs / f"{name}.log"
        return await WorkerProcess.start(spec, driver, log, silence_s, place)
