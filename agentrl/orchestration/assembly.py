"""Puts a run's components together and takes them apart again, whatever happened between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.buffer.episode_buffer import MemoryBuffer
from agentrl.buffer.frontier import FrontierState
from agentrl.buffer.ledger import Ledger
from agentrl.inference.config import AttachedEngineConfig
from agentrl.orchestration.config import PolicyConfig, RunConfig
from agentrl.orchestration.evaluation import Evaluator
from agentrl.orchestration.journal import RunJournal
from agentrl.orchestration.local import LocalRuntime
from agentrl.orchestration.players import build_environments, build_runner, task_sampler
from agentrl.orchestration.recorder import Recorder, RunObserver
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.orchestration.serving import Service, Serving, build_serving, evaluation_transport
from agentrl.protocols import EnvironmentHost, Runtime, Trainer
from agentrl.rollouts.journal import NoJournal
from agentrl.rollouts.runner import EpisodeRunner
from agentrl.tokens.chat import ChatFormat
from agentrl.types.batch import WeightsManifest
from agentrl.types.message import Message, Role
from agentrl.types.task import Split
from agentrl.types.version import PolicyVersion
from agentrl.weights.adapter import ADAPTER_FOLDER
from agentrl.weights.publisher import StagedPublisher

_CANARY_TEXT = "Name three rivers of Europe, and say how much 17 and 25 are."


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where a run begins: at its first weights, or at a checkpoint."""

    version: PolicyVersion
    frontier: FrontierState = field(default_factory=FrontierState)
    checkpoint: Path | None = None


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """What serves and trains one policy."""

    trainer: Trainer
    serving: Serving


@dataclass(frozen=True, slots=True)
class RunParts:
    """Everything that the loops of a run drive."""

    config: RunConfig
    run: RunDirectory
    start: StartPoint
    runtime: Runtime
    policies: dict[str, PolicyParts]
    buffer: MemoryBuffer
    runner: EpisodeRunner
    evaluator: Evaluator | None
    recorder: Recorder
    observer: RunObserver
    journal: RunJournal

    @property
    def services(self) -> list[Service]:
        """Loops that look after the engines of all policies."""
        return [service for parts in self.policies.values() for service in parts.serving.services]


@asynccontextmanager
async def assembled(
    config: RunConfig, run: RunDirectory, start: StartPoint, observer: RunObserver, journal: RunJournal
) -> AsyncIterator[RunParts]:
    """A run's components, started; ended at the end of the block, but for the journal.

    Raises:
        AgentRLError: a component could not be started; names it.
    """
    runtime: Runtime = LocalRuntime(config, run.logs, await asyncio.to_thread(run.mark))
    recorder = Recorder(run, config.name, observer)
    environments = build_environments(config, run.logs)
    try:
        observer.on_start(str(run.path), config.steps)
        observer.on_phase("starting engines and trainer")
        parts = await _assemble(config, run, start, observer, runtime, recorder, environments, journal)
        try:
            yield parts
        finally:
            await asyncio.gather(*(policy.serving.publisher.close() for policy in parts.policies.values()))
    finally:
        await runtime.close()
        await environments.close()
        recorder.close()


async def _assemble(
    config: RunConfig,
    run: RunDirectory,
    start: StartPoint,
    observer: RunObserver,
    runtime: Runtime,
    recorder: Recorder,
    environments: EnvironmentHost,
    journal: RunJournal,
) -> RunParts:
    name, policy = next(iter(config.policies.items()))
    # With LoRA engines keep the base weights, and a checkpoint's adapter comes to them as every later one does.
    model = policy.model if policy.trainer.lora is not None else start.checkpoint or policy.model
    chat = ChatFormat.load(model, policy.chat)
    chat.log_limits()
    async with asyncio.TaskGroup() as starting:
        engines = starting.create_task(runtime.start_engines(name, model, start.version))
        # The trainer goes on reading files of its model, and checkpoints are pruned: it starts from the first model.
        trainer = starting.create_task(runtime.start_trainer(name, policy.model, start.version))
        evaluator = None
        if config.evaluation.is_wanted:
            evaluation = start_evaluator(config, runtime, chat, environments, model, start.version)
            evaluator = starting.create_task(evaluation)
    if start.checkpoint is not None:
        await trainer.result().restore(start.checkpoint)
    first = await _first_weights(name, model, start.version, chat, trainer.result())
    serving = build_serving(policy, engines.result(), runtime, first, run.logs)
    await _prove_first(policy, serving.publisher, first, start, evaluator.result() if evaluator else None)
    buffer = MemoryBuffer(
        config.buffer,
        places=config.rollout.concurrency,
        max_attempts=config.rollout.max_attempts,
        max_consecutive_failures=config.rollout.max_consecutive_failures,
        sample_task=task_sampler(config, Split.TRAIN),
        seed=config.seed,
        versions={name: start.version},
        frontier=start.frontier,
        ledger=Ledger(recorder.write_ledger_line),
        max_groups=_groups_left(config, start, journal),
        journal=journal.buffer,
    )
    buffer.restore(journal.recovered)
    return RunParts(
        config=config,
        run=run,
        start=start,
        runtime=runtime,
        policies={name: PolicyParts(trainer.result(), serving)},
        buffer=buffer,
        runner=build_runner(config, serving.router, chat, environments, journal.rollouts),
        evaluator=evaluator.result() if evaluator else None,
        recorder=recorder,
        observer=observer,
        journal=journal,
    )


async def _first_weights(
    name: str, model: Path, version: PolicyVersion, chat: ChatFormat, trainer: Trainer
) -> WeightsManifest:
    """What engines are to hold at the start, with what the trainer says of some words under the same weights."""
    canary = await trainer.canary(chat.open([Message(Role.USER, _CANARY_TEXT)], []).tolist())
    return WeightsManifest(name, version, str(model.resolve()), {}, 0, canary)


async def _prove_first(
    policy: PolicyConfig,
    publisher: StagedPublisher,
    first: WeightsManifest,
    start: StartPoint,
    evaluator: Evaluator | None,
) -> None:
    """Have the engines hold the first weights, and show that they do. Raises PublishError if none takes them."""
    # Nobody brings engines back yet, so that there is nothing to wait for if all of them fail.
    if policy.trainer.lora is not None and start.checkpoint is not None:
        adapter = replace(first, path=str((start.checkpoint / ADAPTER_FOLDER).resolve()), kind="adapter")
        await publisher.begin(adapter)
        if evaluator is not None:
            await evaluator.load(adapter)
    elif isinstance(policy.engine, AttachedEngineConfig):
        # Nobody knows what an earlier run, or whoever started the engine, left in it.
        await publisher.begin(first)
    else:
        await publisher.prove()


async def start_evaluator(
    config: RunConfig,
    runtime: Runtime,
    chat: ChatFormat,
    environments: EnvironmentHost,
    model: Path,
    version: PolicyVersion,
) -> Evaluator:
    """An evaluator with an engine of its own. Raises ConfigError or EngineError."""
    name = next(iter(config.policies))
    engine = await runtime.start_evaluation_engine(name, model, version)
    runner = build_runner(config, engine, chat, environments, NoJournal())
    sample_task = task_sampler(config, Split.HELDOUT)
    transport = evaluation_transport(config.policies[name])
    return Evaluator(name, engine, transport, runner, sample_task, config.evaluation.concurrency)


def _groups_left(config: RunConfig, start: StartPoint, journal: RunJournal) -> int | None:
    """With staleness 0 nothing is generated that no step will take, so that two runs end alike."""
    if config.buffer.max_staleness > 0 or config.buffer.group_filter != "none":
        return None
    known = len(journal.recovered.groups) + sum(len(step.groups) for step in journal.recovered.redo)
    return (config.steps - start.version.step) * config.buffer.groups_per_step - known
