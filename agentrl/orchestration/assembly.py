"""Puts a run's components together and takes them apart again, whatever happened between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from agentrl.algorithms.credit_config import credit_columns
from agentrl.buffer.episode_buffer import BufferTerms, EnvironmentTerms, MemoryBuffer
from agentrl.buffer.frontier import FrontierState
from agentrl.buffer.ledger import Ledger
from agentrl.buffer.step_journal import NoStepJournal
from agentrl.buffer.tasks import TaskFeed
from agentrl.inference.config import AttachedEngineConfig
from agentrl.inference.fleet import Fleet
from agentrl.orchestration.colocated import ColocatedTrainer
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.evaluation import Evaluator, Exam
from agentrl.orchestration.places import build_places, check_places, members_of, plays_elsewhere
from agentrl.orchestration.players import build_hosts, build_scorers, build_tier
from agentrl.orchestration.program_check import check_forks, check_programs
from agentrl.orchestration.recorder import Recorder, RunObserver
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.orchestration.run_journal import RunJournal
from agentrl.orchestration.runtime import ProcessRuntime
from agentrl.orchestration.scoring import Scoring
from agentrl.orchestration.served import EnvironmentServers
from agentrl.orchestration.serving import Service, Serving, build_serving, evaluation_transport
from agentrl.orchestration.worker_assembly import build_evaluation_pool, build_pool, num_processes
from agentrl.orchestration.worker_pool import WorkerPool
from agentrl.process.place import Places
from agentrl.protocols import EnvironmentHost, Runtime, Trainer
from agentrl.sandbox.keepers import SandboxKeepers
from agentrl.sandbox.starting import sandboxes
from agentrl.scorers.self_teacher import SelfTeacherConfig
from agentrl.scoring.snapshots import SnapshotTeacher
from agentrl.scoring.tier import ScoringTier
from agentrl.telemetry.opening import open_traces
from agentrl.telemetry.run_traces import RunTraces
from agentrl.tokens.chat import ChatFormat
from agentrl.types.batch import Canary, WeightsManifest
from agentrl.types.errors import ConfigError, EngineError, EpisodeError
from agentrl.types.message import Message, Role
from agentrl.types.task import Split
from agentrl.types.version import PolicyVersion
from agentrl.weights.adapter import ADAPTER_FOLDER
from agentrl.weights.publisher import StagedPublisher

_log = logging.getLogger(__name__)
_CANARY_TEXT = "Name three rivers of Europe, and say how much 17 and 25 are."


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where a run begins: each policy at its first weights or at a checkpoint, each environment at its next task."""

    versions: dict[str, PolicyVersion]
    frontiers: dict[str, FrontierState] = field(default_factory=dict)
    checkpoints: dict[str, Path] = field(default_factory=dict)
    number: int = 0
    """Checkpoints that the run has made."""


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """What serves one policy, and what trains it: nothing, if it is frozen."""

    serving: Serving
    trainer: Trainer | None


@dataclass(frozen=True, slots=True)
class RunParts:
    """Everything that the loops of a run drive."""

    config: RunConfig
    run: RunDirectory
    start: StartPoint
    runtime: Runtime
    policies: dict[str, PolicyParts]
    hosts: Mapping[str, EnvironmentHost]
    buffer: MemoryBuffer
    pool: WorkerPool
    scoring: Scoring
    evaluator: Evaluator | None
    recorder: Recorder
    observer: RunObserver
    journal: RunJournal
    keepers: SandboxKeepers
    traces: RunTraces = field(default_factory=RunTraces)
    snapshots: tuple[SnapshotTeacher, ...] = ()
    """Earlier versions of policies that teach them."""
    services: tuple[Service, ...] = ()
    """Loops that look after engines and tasks as long as the run lasts."""

    def trainer(self, policy: str) -> Trainer:
        """What trains a policy that is not frozen."""
        trainer = self.policies[policy].trainer
        assert trainer is not None
        return trainer

    def counted(self, policy: str) -> dict[str, float]:
        """What was counted of a policy's engines, of workers, scoring and sandboxes since the run's process began."""
        engines, workers = self.policies[policy].serving.metrics(), self.pool.metrics()
        return {**engines, **workers, **self.scoring.metrics(), **self.keepers.metrics()}


@asynccontextmanager
async def assembled(
    config: RunConfig, run: RunDirectory, start: StartPoint, observer: RunObserver, journal: RunJournal
) -> AsyncIterator[RunParts]:
    """A run's components, started; ended at the end of the block, but for the journal.

    The run has its mark from where engines and trainer are started: without one it has not begun.

    Raises:
        AgentRLError: a component could not be started; names it.
    """
    async with AsyncExitStack() as ending:
        recorder = Recorder(run, config.name, observer)
        ending.callback(recorder.close)
        recorder.follow({policy: config.played_by(policy) for policy in config.trained})
        chats = load_chats(config, {name: _first_model(config, start, name) for name in config.policies})
        places = await build_places(config)
        ending.push_async_callback(places.close)
        # The nodes of a run that goes on were there before: those that it lost may be about to come back.
        on_wait = observer.on_phase if run.has_begun else None
        await check_places(config, run.path, members_of(config), on_wait)
        servers = await ending.enter_async_context(EnvironmentServers.started(config, places, run.logs))
        config = servers.config
        own = await ending.enter_async_context(sandboxes(config.sandbox, config.name, run.logs / "sandboxes.log"))
        hosts = await build_hosts(config, run.logs, plays=num_processes(config) == 0, on_phase=observer.on_phase)
        ending.push_async_callback(_close_all, hosts.values())
        described = [host.description for host in hosts.values()]
        if not plays_elsewhere(config):
            await own.start_for(described)
            await check_programs(config, hosts)
        check_forks(config, hosts)
        keepers = SandboxKeepers(own, config.sandbox, config.name, run.logs, places, described)
        ending.push_async_callback(keepers.close)
        runtime = ProcessRuntime(config, run.logs, places, await asyncio.to_thread(run.mark))
        ending.push_async_callback(runtime.close)
        observer.on_start(str(run.path), config.steps, config.trained)
        observer.on_phase("starting engines and trainer")
        traces = open_traces(config.telemetry, run.path)
        ending.push_async_callback(asyncio.to_thread, traces.close)
        assembly = _Assembly(
            config, run, start, observer, places, runtime, recorder, chats, hosts, journal, keepers, servers, traces
        )
        parts = await assembly.build()
        ending.push_async_callback(_close_all, [policy.serving.publisher for policy in parts.policies.values()])
        yield parts


async def _close_all(parts: Iterable[EnvironmentHost | StagedPublisher]) -> None:
    await asyncio.gather(*(part.close() for part in parts))


def load_chats(config: RunConfig, models: Mapping[str, Path]) -> dict[str, ChatFormat]:
    """The chat format of each policy's model folder, whose limits are said. Raises ConfigError."""
    chats = {}
    for name, policy in config.policies.items():
        try:
            chats[name] = ChatFormat.load(models[name], policy.chat)
        except ConfigError as error:
            raise ConfigError(f"policies.{name}: {error}") from error
        chats[name].log_limits()
    return chats


def _first_model(config: RunConfig, start: StartPoint, policy: str) -> Path:
    """The folder that a policy's engines begin with."""
    settings = config.policies[policy]
    # With LoRA engines keep the base weights, and a checkpoint's adapter comes to them as every later one does.
    return settings.model if settings.trainer.lora is not None else start.checkpoints.get(policy, settings.model)


@dataclass(frozen=True, slots=True)
class _Assembly:
    """Starts the components of one run, those of all policies at once."""

    config: RunConfig
    run: RunDirectory
    start: StartPoint
    observer: RunObserver
    places: Places
    runtime: ProcessRuntime
    recorder: Recorder
    chats: Mapping[str, ChatFormat]
    hosts: Mapping[str, EnvironmentHost]
    journal: RunJournal
    keepers: SandboxKeepers
    servers: EnvironmentServers
    traces: RunTraces

    async def build(self) -> RunParts:
        """Everything, with engines that have shown what they hold. Raises AgentRLError."""
        config, journal, chats = self.config, self.journal, self.chats
        evaluator = None
        async with asyncio.TaskGroup() as starting:
            tasks = {name: starting.create_task(self._start_policy(name, chats[name])) for name in config.policies}
            if any(map(config.is_evaluated, config.trained)):
                models = {name: _first_model(config, self.start, name) for name in config.policies}
                evaluation = start_evaluator(
                    config, self.run.logs, self.keepers, self.runtime, chats, self.hosts, models, self.start.versions
                )
                evaluator = starting.create_task(evaluation)
        started = {name: task.result() for name, task in tasks.items()}
        policies = {name: parts for name, (parts, _) in started.items()}
        for name, (parts, first) in started.items():
            await self._prove_first(name, parts, first, evaluator.result() if evaluator else None)
        feed = TaskFeed({name: partial(host.sample, Split.TRAIN, config.seed) for name, host in self.hosts.items()})
        buffer = MemoryBuffer(
            self._terms(), feed, self.start.frontiers, Ledger(self.recorder.write_ledger_line), journal.buffer
        )
        buffer.restore(journal.recovered)
        routers = {name: parts.serving.router for name, parts in policies.items()}
        snapshots = await self._start_snapshots()
        tier = await self._open_tier(policies, snapshots)
        logs, traces = self.run.logs, self.traces
        pool = build_pool(config, logs, routers, chats, self.hosts, journal, self.keepers, tier.played, traces)
        services = [service for parts in policies.values() for service in parts.serving.services]
        admissions = [partial(_admit, self.runtime, n, parts.serving.fleet, pool) for n, parts in policies.items()]
        return RunParts(
            config=config,
            run=self.run,
            start=self.start,
            runtime=self.runtime,
            policies=policies,
            hosts=self.hosts,
            buffer=buffer,
            pool=pool,
            scoring=Scoring(build_scorers(config), journal.buffer, tier, traces),
            evaluator=evaluator.result() if evaluator else None,
            recorder=self.recorder,
            observer=self.observer,
            journal=journal,
            keepers=self.keepers,
            traces=traces,
            snapshots=tuple(snapshots.values()),
            services=(
                *services,
                *admissions,
                self.servers.run,
                feed.run,
                tier.run,
                *(snapshot.run for snapshot in snapshots.values()),
            ),
        )

    async def _start_snapshots(self) -> dict[str, SnapshotTeacher]:
        """The engines of earlier versions, by the scorer that asks them. Raises ConfigError or EngineError."""
        found = {}
        for scorer in (s for s in self.config.turn_scorers() if isinstance(s, SelfTeacherConfig)):
            policy = scorer.policy
            model, version = _first_model(self.config, self.start, policy), self.start.versions[policy]
            engine = await self.runtime.start_side_engine(scorer.name, policy, model, version)
            transport = evaluation_transport(self.config.policies[policy])
            found[scorer.name] = SnapshotTeacher(scorer, Fleet([engine], version), transport)
        return found

    async def _open_tier(
        self, policies: Mapping[str, PolicyParts], snapshots: Mapping[str, SnapshotTeacher]
    ) -> ScoringTier:
        """The scorers of turns, ready. Raises ConfigError."""
        fleets = {name: parts.serving.fleet for name, parts in policies.items()}
        journal, logs = self.journal, self.run.logs
        known = journal.turn_scores()
        tier = build_tier(self.config, fleets, snapshots, logs, journal.buffer, known, self.places, self.traces)
        try:
            await tier.open()
        except EpisodeError as error:
            raise ConfigError(str(error)) from error
        return tier

    async def _start_policy(self, policy: str, chat: ChatFormat) -> tuple[PolicyParts, WeightsManifest]:
        """A policy's engines and trainer, and the weights that its engines are to hold."""
        config, version = self.config.policies[policy], self.start.versions[policy]
        model = _first_model(self.config, self.start, policy)
        async with asyncio.TaskGroup() as starting:
            engines = starting.create_task(self.runtime.start_engines(policy, model, version))
            trainer = starting.create_task(self._start_trainer(policy))
        canary = await _canary(chat, trainer.result())
        # Of a frozen policy nobody makes a canary: its engines show their version and the layout of their weights.
        first = WeightsManifest(policy, version, str(model.resolve()), {}, 0, canary)
        host, still_s = self.places.host, config.trainer.deadlines.step_s if self.config.runtime.colocated else 0.0
        serving = build_serving(config, engines.result(), self.runtime, first, self.run.logs, host, still_s)
        if self.config.runtime.colocated and (own := trainer.result()) is not None:
            return PolicyParts(serving, ColocatedTrainer(own, serving.fleet)), first
        return PolicyParts(serving, trainer.result()), first

    async def _start_trainer(self, policy: str) -> Trainer | None:
        if self.config.policies[policy].frozen:
            return None
        # The trainer goes on reading files of its model, and checkpoints are pruned: it starts from the first model.
        model, version = self.config.policies[policy].model, self.start.versions[policy]
        trainer = await self.runtime.start_trainer(policy, model, version)
        if policy in self.start.checkpoints:
            await trainer.restore(self.start.checkpoints[policy])
        return trainer

    async def _prove_first(
        self, policy: str, parts: PolicyParts, first: WeightsManifest, evaluator: Evaluator | None
    ) -> None:
        """Have the engines hold the first weights, and show that they do. Raises PublishError if none takes them."""
        config, checkpoint = self.config.policies[policy], self.start.checkpoints.get(policy)
        # Nobody brings engines back yet, so that there is nothing to wait for if all of them fail.
        if config.trainer.lora is not None and checkpoint is not None:
            adapter = replace(first, path=str((checkpoint / ADAPTER_FOLDER).resolve()), kind="adapter")
            await parts.serving.publisher.begin(adapter)
            if evaluator is not None:
                await evaluator.load(adapter)
        elif isinstance(config.engine, AttachedEngineConfig):
            # Nobody knows what an earlier run, or whoever started the engine, left in it.
            await parts.serving.publisher.begin(first)
        else:
            await parts.serving.publisher.prove()

    def _terms(self) -> BufferTerms:
        config = self.config
        return BufferTerms(
            configs={policy: config.buffer_of(policy) for policy in config.trained},
            environments={
                name: EnvironmentTerms(section.weight, config.trained_in(name))
                for name, section in config.environments.items()
            },
            versions=self.start.versions,
            seed=config.seed,
            places=config.rollout.concurrency,
            max_attempts=config.rollout.max_attempts,
            max_consecutive_failures=config.rollout.max_consecutive_failures,
            max_groups=self._max_groups(),
            columns={policy: credit_columns(config.policies[policy].algorithm.credit) for policy in config.trained},
        )

    def _max_groups(self) -> dict[str, int]:
        """With staleness 0 nothing is generated that no step will take, so that two runs end alike."""
        bounds = {}
        recovered = self.journal.recovered
        for policy in self.config.trained:
            config = self.config.buffer_of(policy)
            if config.max_staleness == 0 and config.group_filter == "none":
                redone = {group.number for step in recovered.redo.get(policy, ()) for group in step.groups}
                waiting = {group.number for group in recovered.groups if policy in group.waits_for}
                steps = self.config.steps - self.start.versions[policy].step
                bounds[policy] = steps * config.groups_per_step - len(redone | waiting)
        return bounds


async def _admit(runtime: ProcessRuntime, policy: str, fleet: Fleet, pool: WorkerPool) -> None:
    """Waits for: workers, then for engines that find room late, which join the fleet. Ends by cancellation."""
    await pool.until_up()
    while True:
        try:
            fleet.joined(await runtime.late_engine(policy))
        except EngineError as error:
            _log.warning("an engine has not joined: %s", error)


async def _canary(chat: ChatFormat, trainer: Trainer | None) -> Canary | None:
    """What the trainer says of some words under the first weights."""
    if trainer is None:
        return None
    return await trainer.canary(chat.open([Message(Role.USER, _CANARY_TEXT)], []).tolist())


async def start_evaluator(
    config: RunConfig,
    logs: Path,
    places: Places,
    runtime: Runtime,
    chats: Mapping[str, ChatFormat],
    hosts: Mapping[str, EnvironmentHost],
    models: Mapping[str, Path],
    versions: Mapping[str, PolicyVersion],
) -> Evaluator:
    """An evaluator with an engine of its own for each policy that acts. Raises ConfigError or EngineError."""
    names = config.acting
    started = await asyncio.gather(
        *(runtime.start_side_engine("evaluation", name, models[name], versions[name]) for name in names)
    )
    engines = dict(zip(names, started, strict=True))
    exam = Exam(
        pool=build_evaluation_pool(config, logs, engines, chats, hosts, places),
        hosts=hosts,
        policies={name: config.trained_in(name) for name, section in config.environments.items() if section.evaluated},
        seed=config.seed,
        concurrency=config.evaluation.concurrency,
    )
    transports = {name: evaluation_transport(config.policies[name]) for name in names}
    return Evaluator(engines, transports, exam, Scoring(build_scorers(config), NoStepJournal()))
