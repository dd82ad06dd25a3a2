"""Starts and resumes runs: what the commands call, and anyone who trains from Python."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from agentrl.orchestration.assembly import StartPoint, assembled, start_evaluator
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.controller import Controller
from agentrl.orchestration.ending import RunSummary, first_failure
from agentrl.orchestration.evaluation import Evaluation
from agentrl.orchestration.local import LocalRuntime
from agentrl.orchestration.players import build_environments
from agentrl.orchestration.recorder import RunObserver
from agentrl.orchestration.run_directory import RunDirectory, RunState, RunStatus
from agentrl.tokens.chat import ChatFormat
from agentrl.types.errors import AgentRLError, ConfigError, StorageError
from agentrl.types.version import PolicyVersion

_FIRST = PolicyVersion(0, 0)


async def start_run(config: RunConfig, observer: RunObserver) -> RunSummary:
    """Train by a configuration into a new run folder. Raises AgentRLError."""
    for name, policy in config.policies.items():
        if not (policy.model / "config.json").is_file():
            raise ConfigError(
                f"policies.{name}.model: no model at {policy.model} (config.json is missing); make one with "
                "`agentrl warmstart`, or give a folder made by save_pretrained"
            )
    return await _run(config, RunDirectory.create(config), StartPoint(_FIRST), observer)


async def resume_run(path: Path, observer: RunObserver) -> RunSummary:
    """Go on from the latest checkpoint, or from the start if there is none.

    The epoch rises: tokens that were sampled after the checkpoint never pass for tokens of the new weights.

    Raises:
        ConfigError: no run there, or nothing left to do.
        AgentRLError: the run failed again.
    """
    run = RunDirectory.open(path)
    config, state = run.config(), run.state()
    if state is not None and state.status is RunStatus.FINISHED:
        raise ConfigError(f"{path} is finished at version {state.version}; nothing is left to resume")
    epoch = state.version.epoch + 1 if state is not None else 0
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        return await _run(config, run, StartPoint(PolicyVersion(epoch, 0)), observer)
    folder, progress = checkpoint
    start = StartPoint(PolicyVersion(epoch, progress.version.step), progress.frontier, folder)
    return await _run(config, run, start, observer)


async def evaluate_model(
    config: RunConfig, model: Path, num_tasks: int, on_progress: Callable[[int, int, str], None]
) -> Evaluation:
    """Evaluate a model folder on held-out tasks, with an engine for the occasion. Raises AgentRLError."""
    with tempfile.TemporaryDirectory(prefix="agentrl-eval-") as logs:
        runtime = LocalRuntime(config, Path(logs))
        environments = build_environments(config, Path(logs))
        chat = ChatFormat.load(model, next(iter(config.policies.values())).chat)
        try:
            evaluator = await start_evaluator(config, runtime, chat, environments, model, _FIRST)
            return await evaluator.run(_FIRST, num_tasks, lambda done: on_progress(done, num_tasks, "episodes"))
        finally:
            await runtime.close()
            await environments.close()


async def _run(config: RunConfig, run: RunDirectory, start: StartPoint, observer: RunObserver) -> RunSummary:
    try:
        async with assembled(config, run, start, observer) as parts:
            return await Controller(parts).run()
    except BaseExceptionGroup as group:
        error = first_failure(group)
        _note_failure(run, start.version, error)
        raise error from None
    except AgentRLError as error:
        _note_failure(run, start.version, error)
        raise


def _note_failure(run: RunDirectory, version: PolicyVersion, error: BaseException) -> None:
    """Leave the reason in the run folder, unless the controller did, or the disk takes nothing more."""
    try:
        state = run.state()
        if state is None or state.status is RunStatus.RUNNING:
            run.write_state(RunState(RunStatus.FAILED, state.version if state else version, str(error)))
    except StorageError:
        return
