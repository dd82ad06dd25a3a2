"""Starts and resumes runs: what the commands call, and anyone who trains from Python."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agentrl.buffer.frontier import FrontierState
from agentrl.journal.claim import Claim
from agentrl.journal.rewriting import finish_rewriting
from agentrl.orchestration.assembly import StartPoint, assembled, start_evaluator
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.controller import Controller
from agentrl.orchestration.evaluation import Evaluation
from agentrl.orchestration.journal import RunJournal
from agentrl.orchestration.local import LocalRuntime
from agentrl.orchestration.players import build_environments
from agentrl.orchestration.recorder import RunObserver
from agentrl.orchestration.run_directory import Progress, RunDirectory, RunState, RunStatus
from agentrl.orchestration.shutdown import RunSummary, first_failure
from agentrl.process.heap import gc_frozen
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
    return await _run(config, RunDirectory.create(config), observer)


async def resume_run(path: Path, observer: RunObserver, is_salvaged: bool = False) -> RunSummary:
    """Go on where a run stopped or died.

    Trainer and ledger go on from the latest checkpoint, or from the start if there is none; steps behind it are
    redone from the journal, episodes in flight go on from their last token. Without a journal both are lost and the
    epoch rises: tokens that were sampled after the checkpoint never pass for tokens of the new weights. With
    `is_salvaged` damaged or missing parts of journal and ledger are passed over; what they held is lost and counted.

    Raises:
        ConfigError: no run there, or nothing left to do.
        AgentRLError: the run failed again.
    """
    run = RunDirectory.open(path)
    config, state = run.config(), run.state()
    if state is not None and state.status is RunStatus.FINISHED:
        raise ConfigError(f"{path} is finished at version {state.version}; nothing is left to resume")
    return await _run(config, run, observer, is_salvaged)


def _start_point(config: RunConfig, run: RunDirectory) -> tuple[StartPoint, Progress]:
    folder, progress = run.latest_checkpoint() or (None, Progress(_FIRST, FrontierState()))
    version, state = progress.version, run.state()
    if config.journal.kind == "none" and state is not None:
        version = PolicyVersion(state.version.epoch + 1, version.step)
    return StartPoint(version, progress.frontier, folder), progress


async def evaluate_model(
    config: RunConfig, model: Path, num_tasks: int, on_progress: Callable[[int, int, str], None]
) -> Evaluation:
    """Evaluate a model folder on held-out tasks, with an engine for the occasion. Raises AgentRLError."""
    with tempfile.TemporaryDirectory(prefix="agentrl-eval-") as logs:
        runtime = LocalRuntime(config, Path(logs))
        environments = build_environments(config, Path(logs))
        chat = ChatFormat.load(model, next(iter(config.policies.values())).chat)
        chat.log_limits()
        try:
            evaluator = await start_evaluator(config, runtime, chat, environments, model, _FIRST)
            return await evaluator.run(_FIRST, num_tasks, lambda done: on_progress(done, num_tasks, "episodes"))
        finally:
            await runtime.close()
            await environments.close()


async def _run(config: RunConfig, run: RunDirectory, observer: RunObserver, is_salvaged: bool = False) -> RunSummary:
    start, journal = await asyncio.to_thread(_begin, config, run, is_salvaged)
    try:
        async with assembled(config, run, start, observer, journal) as parts:
            with gc_frozen():
                return await Controller(parts).run()
    except BaseExceptionGroup as group:
        error = first_failure(group)
        if journal.is_held:
            _note_failure(run, start.version, error)
        raise error from None
    except AgentRLError as error:
        if journal.is_held:
            _note_failure(run, start.version, error)
        raise
    finally:
        await journal.close()


def _begin(config: RunConfig, run: RunDirectory, is_salvaged: bool) -> tuple[StartPoint, RunJournal]:
    """Where the run goes on from. It is claimed first: another process may be at work on it until then."""
    if config.journal.kind == "none":
        start, progress = _start_point(config, run)
        _cut_ledger(run, start, progress, is_salvaged)
        return start, RunJournal.none()
    finish_rewriting(run.journal)
    claim = Claim.take(run.journal)
    start, progress = _start_point(config, run)
    in_ledger = _cut_ledger(run, start, progress, is_salvaged)
    return start, RunJournal.open(claim, run, config, progress, in_ledger, is_salvaged)


def _cut_ledger(run: RunDirectory, start: StartPoint, progress: Progress, is_salvaged: bool) -> set[str]:
    """Names of the episodes that stay on the ledger. Raises StorageError if it is short and not to be salvaged."""
    in_ledger = run.cut_ledger(progress.ledger_bytes, is_salvaged)
    kept_bytes = run.ledger.stat().st_size if run.ledger.is_file() else 0
    if start.checkpoint is not None and kept_bytes != progress.ledger_bytes:
        # From here on the checkpoint ends where the ledger does, or the next resume would cut among later lines.
        run.write_progress(start.checkpoint, replace(progress, ledger_bytes=kept_bytes))
    return in_ledger


def _note_failure(run: RunDirectory, version: PolicyVersion, error: BaseException) -> None:
    """Leave the reason in the run folder, unless the controller did, or the disk takes nothing more."""
    try:
        state = run.state()
        if state is None or state.status is RunStatus.RUNNING:
            run.write_state(RunState(RunStatus.FAILED, state.version if state else version, str(error)))
    except StorageError:
        return
