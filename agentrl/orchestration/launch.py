"""Starts and resumes runs: what the commands call, and anyone who trains from Python."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from types import FrameType

from agentrl.cluster.config import LocalRuntimeConfig
from agentrl.journal.claim import Claim
from agentrl.orchestration.assembly import StartPoint, assembled, load_chats, start_evaluator
from agentrl.orchestration.checkpoint_files import mend_checkpoints, put_aside_damaged
from agentrl.orchestration.checkpoint_repair import CheckpointRepair
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.controller import Controller
from agentrl.orchestration.evaluation import Evaluation, Evaluator
from agentrl.orchestration.going_on import begun_run, going_on
from agentrl.orchestration.places import build_places, check_places, evaluators_of, plays_elsewhere
from agentrl.orchestration.players import build_hosts
from agentrl.orchestration.preflight import check_evaluation, check_resumed, check_run
from agentrl.orchestration.program_check import check_programs
from agentrl.orchestration.recorder import RunObserver
from agentrl.orchestration.run_directory import Progress, RunDirectory, RunState, RunStatus
from agentrl.orchestration.run_end import ArchiveCompleted, complete_archive, end_run
from agentrl.orchestration.run_files import changes, losses, marks_now, restore_claims, take_back_metrics
from agentrl.orchestration.run_journal import RunJournal
from agentrl.orchestration.run_metrics import serving_metrics
from agentrl.orchestration.runtime import ProcessRuntime
from agentrl.orchestration.served import EnvironmentServers
from agentrl.orchestration.shutdown import RunSummary, first_failure
from agentrl.orchestration.worker_assembly import num_processes
from agentrl.process.heap import gc_frozen
from agentrl.process.standstill import ended_by_standstill
from agentrl.process.stopping import StopSignals
from agentrl.rollouts.runner import played_in
from agentrl.sandbox.keepers import SandboxKeepers
from agentrl.sandbox.starting import sandboxes
from agentrl.telemetry.trace_events import write_trace
from agentrl.types.episode import Episode
from agentrl.types.errors import AgentRLError, RunStoppedError, StorageError
from agentrl.types.task import Split
from agentrl.types.version import FIRST_VERSION, PolicyVersion

_log = logging.getLogger(__name__)


async def start_run(config: RunConfig, observer: RunObserver) -> RunSummary:
    """Train by a configuration into a new run folder; one that fails before engines are started leaves none.

    Raises:
        AgentRLError: something in the configuration does not fit, or the run failed.
    """
    check_run(config)
    run = RunDirectory.create(config)
    try:
        return await _run(config, run, observer)
    except BaseException:
        if not run.has_begun:  # nothing was started, and there is nothing to look at
            shutil.rmtree(run.path, ignore_errors=True)
        raise


async def start_or_resume_run(config: RunConfig, observer: RunObserver) -> RunSummary | ArchiveCompleted:
    """Go on with the run folder that a configuration has already, or start it: what a job system may call again.

    Raises:
        ConfigError: the folder's run was started with another configuration.
        AgentRLError: as of `start_run` and `resume_run`.
    """
    run = begun_run(config)
    if run is None:
        return await start_run(config, observer)
    state = run.state()
    if state is not None and state.status is RunStatus.FINISHED:
        return ArchiveCompleted(run.path, state.version, 0)
    return await resume_run(run.path, observer)


async def resume_run(path: Path, observer: RunObserver, is_salvaged: bool = False) -> RunSummary | ArchiveCompleted:
    """Go on where a run stopped or died; of one that has made all its steps complete the archive, and start nothing.

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
    # What a damaged journal has lost cannot be archived: salvaged, the run comes to its end anew.
    over = (RunStatus.FINISHED,) if is_salvaged else (RunStatus.FINISHED, RunStatus.UNARCHIVED)
    if state is not None and state.status in over:
        completed = await complete_archive(run, config, state)
        _note_files(run, is_at_rest=True)
        return completed
    check_resumed(config)
    return await _run(config, run, observer, is_salvaged)


def _start_point(config: RunConfig, run: RunDirectory, is_salvaged: bool) -> tuple[StartPoint, Progress]:
    first = Progress(dict.fromkeys(config.policies, FIRST_VERSION))
    if is_salvaged:
        put_aside_damaged(run)
    found = (progress for _, progress in run.checkpoints() if not is_salvaged or _has_all(run, progress))
    progress = next(found, first)
    versions = {**first.versions, **progress.versions}
    folders = {policy: run.saved(policy, version) for policy, version in versions.items()}
    checkpoints = {policy: folder for policy, folder in folders.items() if folder is not None}
    for policy, version in versions.items():
        if version.step and policy not in checkpoints:
            raise StorageError(
                f"{run.checkpoint(policy, version.step)} is missing, which the newest checkpoint names as that of "
                f"policy '{policy}'; put it back, or go on from older ones: `agentrl resume RUN --salvage`"
            )
    state = run.state()
    if config.journal.kind == "none" and state is not None:
        epoch = 1 + max(version.epoch for version in state.versions.values())
        versions = {policy: PolicyVersion(epoch, version.step) for policy, version in versions.items()}
    progress = replace(progress, versions={policy: versions[policy] for policy in config.trained})
    return StartPoint(versions, progress.frontiers, checkpoints, progress.number), progress


def _has_all(run: RunDirectory, progress: Progress) -> bool:
    """Whether the checkpoints of all policies that one names are there."""
    return all(not version.step or run.saved(policy, version) for policy, version in progress.versions.items())


async def evaluate_model(
    config: RunConfig,
    policy: str,
    models: Mapping[str, Path],
    versions: Mapping[str, PolicyVersion],
    num_tasks: int,
    on_progress: Callable[[int, int, str], None],
) -> Evaluation:
    """Evaluate a policy on held-out tasks, with engines for the occasion over each policy's model folder.

    `versions` are the names of their weights.

    Raises:
        AgentRLError: an engine or all episodes failed.
    """
    async with _evaluator(config, policy, models, versions) as evaluator:
        return await evaluator.run(policy, versions[policy], num_tasks, _told(on_progress))


async def play_model(
    config: RunConfig, policy: str, num_tasks: int, on_progress: Callable[[int, int, str], None]
) -> list[Episode]:
    """Episodes of a policy's first model on tasks that it will train on, one of each, failed ones included.

    Raises:
        AgentRLError: an engine failed.
    """
    models = {name: settings.model for name, settings in config.policies.items()}
    versions = dict.fromkeys(models, FIRST_VERSION)
    async with _evaluator(config, policy, models, versions) as evaluator:
        names = config.played_by(policy)
        return await evaluator.play(names, versions, num_tasks, Split.TRAIN, _told(on_progress))


@asynccontextmanager
async def _evaluator(
    config: RunConfig, policy: str, models: Mapping[str, Path], versions: Mapping[str, PolicyVersion]
) -> AsyncIterator[Evaluator]:
    """An evaluator over engines for the occasion. Raises AgentRLError."""
    check_evaluation(config, policy, models)
    chats = load_chats(config, models)
    async with AsyncExitStack() as ending:
        logs = ending.enter_context(_log_folder(config))
        places = await build_places(config)
        ending.push_async_callback(places.close)
        await check_places(config, Path(logs), evaluators_of(config))
        config = (await ending.enter_async_context(EnvironmentServers.started(config, places, Path(logs)))).config
        own = await ending.enter_async_context(sandboxes(config.sandbox, config.name))
        hosts = await build_hosts(config, Path(logs), plays=num_processes(config) == 0)
        described = [host.description for host in hosts.values()]
        keepers = SandboxKeepers(own, config.sandbox, config.name, Path(logs), places, described)
        ending.push_async_callback(keepers.close)
        runtime = ProcessRuntime(config, Path(logs), places)
        try:
            if not plays_elsewhere(config):
                await own.start_for(described)
                await check_programs(config, hosts)
            yield await start_evaluator(config, Path(logs), keepers, runtime, chats, hosts, models, versions)
        finally:
            await runtime.close()
            await asyncio.gather(*(host.close() for host in hosts.values()))


def _log_folder(config: RunConfig) -> tempfile.TemporaryDirectory[str]:
    """Where logs of an evaluation are, which all of its processes see."""
    if isinstance(config.runtime, LocalRuntimeConfig):
        return tempfile.TemporaryDirectory(prefix="agentrl-eval-")
    folder = config.runs_folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="evaluation-", dir=folder)


def _told(on_progress: Callable[[int, int, str], None]) -> Callable[[int, int], None]:
    return lambda done, of: on_progress(done, of, "episodes")


async def _run(config: RunConfig, run: RunDirectory, observer: RunObserver, is_salvaged: bool = False) -> RunSummary:
    """Until the end, or until the process is asked to stop: a run that still starts then stops by being cut off."""
    starting = asyncio.current_task()
    assert starting is not None
    with StopSignals().installed() as signals, signals.telling(starting.cancel):
        try:
            # What was salvaged is whole by now: whatever is damaged later was so by something else.
            attempts = chain([is_salvaged], repeat(False))
            return await going_on(
                run,
                config.runtime.max_resumes,
                observer,
                lambda: _start_and_run(config, run, observer, next(attempts), signals),
                lambda: signals.has_come,
            )
        except asyncio.CancelledError:
            if not signals.has_come:
                raise
            message = f"asked to stop; go on with: agentrl resume {run.path}"
            raise RunStoppedError(message) from None


async def _start_and_run(
    config: RunConfig, run: RunDirectory, observer: RunObserver, is_salvaged: bool, signals: StopSignals
) -> RunSummary:
    if any(config.buffer_of(policy).max_staleness == "unbounded" for policy in config.trained):
        _log.warning(
            "buffer.max_staleness = 'unbounded': tokens of any age are trained, and episodes pile up if they come "
            "faster than steps; watch buffer/staleness_max_steps and buffer/ready_episodes"
        )
    start, journal = await asyncio.to_thread(_begin, config, run, is_salvaged)
    try:
        start = await CheckpointRepair(config, run, journal, observer).run_all(start)
        async with assembled(config, run, start, observer, journal) as parts:
            controller = Controller(parts)

            def stood_still(frame: FrameType, place: str) -> None:
                message = _standstill(config.rollout.worker_silence_s, frame, place, run)
                _log.critical("error: %s", message)
                if journal.is_held:
                    run.write_state(RunState(RunStatus.FAILED, controller.versions(), message))

            watched = ended_by_standstill(config.rollout.worker_silence_s, stood_still)
            with gc_frozen(), signals.telling(controller.request_stop), watched, serving_metrics(parts):
                summary = await controller.run()
        if summary.status is RunStatus.FINISHED:
            observer.on_phase("archiving the last episodes")
            await end_run(run, config, journal, summary.versions)
        await asyncio.to_thread(_write_trace, run)
        return summary
    except BaseExceptionGroup as group:
        error = first_failure(group)
        if journal.is_held:
            _note_failure(run, start.versions, error)
        raise error from None
    except AgentRLError as error:
        if journal.is_held:
            _note_failure(run, start.versions, error)
        raise
    finally:
        await journal.close()
        if journal.is_held:
            _note_files(run, is_at_rest=True)


def _write_trace(run: RunDirectory) -> None:
    """All spans of the run as one file; a run has not failed because that could not be written."""
    try:
        write_trace(run.path)
    except OSError as error:
        _log.warning("the run's trace cannot be written: %s; free space, then `agentrl runs trace %s`", error, run.path)


def _standstill(limit_s: float, frame: FrameType, place: str, run: RunDirectory) -> str:
    playing = played_in(frame)
    return (
        f"the event loop of the run has stood still {limit_s:g} s{f' while {playing}' if playing else ''}: {place}; "
        "await what waits or computes for long, or set rollout.workers = 1, so that another process plays; "
        f"go on with: agentrl resume {run.path}"
    )


def _begin(config: RunConfig, run: RunDirectory, is_salvaged: bool) -> tuple[StartPoint, RunJournal]:
    """Where the run goes on from. It is claimed first: another process may be at work on it until then."""
    state = run.state()
    if config.journal.kind == "none":
        _look_at_files(config, run, state, is_salvaged)
        start, progress = _start_point(config, run, is_salvaged)
        _cut_ledger(run, progress, is_salvaged)
        journal = RunJournal.none()
    else:
        if state is not None:
            restore_claims(run.path, state.files)
        claim = Claim.take(run.journal)
        _look_at_files(config, run, state, is_salvaged)
        start, progress = _start_point(config, run, is_salvaged)
        in_ledger = _cut_ledger(run, progress, is_salvaged)
        journal = RunJournal.open(claim, run, config, progress, in_ledger, is_salvaged)
    redone = {policy: len(journal.recovered.redo.get(policy, ())) for policy in config.trained}
    take_back_metrics(run.metrics, {policy: start.versions[policy].step + redone[policy] for policy in config.trained})
    _note_files(run, is_at_rest=False)
    return start, journal


def _look_at_files(config: RunConfig, run: RunDirectory, state: RunState | None, is_salvaged: bool) -> None:
    """Put checkpoints in order, and say what else is not as it was.

    Raises:
        StorageError: what cannot be done without is damaged or missing, and not to be salvaged.
    """
    mend_checkpoints(run)
    if state is None:
        if next(run.checkpoints(), None) is not None:
            path = run.path / "state.json"
            _log.warning("%s is missing; restore it from a copy; going on from the newest checkpoint and journal", path)
        return
    for change in changes(run.path, state.files):
        _log.warning("%s", change)
    for name, loss in losses(run.path, state.files, config.journal.keep_bytes).items():
        if "/claim-" in name:
            continue  # this process's own has taken its place
        if not name.endswith(".journal"):
            _log.warning("%s; restore it from a copy; going on without", loss)
        elif not is_salvaged:
            raise StorageError(
                f"journal segment {loss}: what was acknowledged in it is lost; restore the file from a copy, or go on "
                "without it: `agentrl resume RUN --salvage`"
            )


def _cut_ledger(run: RunDirectory, progress: Progress, is_salvaged: bool) -> set[str]:
    """Names of the episodes that stay on the ledger. Raises StorageError if it is short and not to be salvaged."""
    in_ledger = run.cut_ledger(progress.ledger_bytes, is_salvaged)
    kept_bytes = run.ledger.stat().st_size if run.ledger.is_file() else 0
    newest = next(run.checkpoints(), None)
    if newest is not None and kept_bytes != progress.ledger_bytes:
        # From here on the checkpoint ends where the ledger does, or the next resume would cut among later lines.
        run.write_progress(newest[0], replace(progress, ledger_bytes=kept_bytes))
    return in_ledger


def _note_files(run: RunDirectory, is_at_rest: bool) -> None:
    """Leave marks of the run's files in its state, if the disk takes that."""
    with suppress(StorageError):
        state = run.state()
        if state is not None:
            run.write_state(replace(state, files=marks_now(run.path, is_at_rest)))


def _note_failure(run: RunDirectory, versions: dict[str, PolicyVersion], error: BaseException) -> None:
    """Leave the reason in the run folder, unless the controller did, or the disk takes nothing more."""
    try:
        state = run.state()
        if state is None or state.status is RunStatus.RUNNING:
            files = marks_now(run.path, is_at_rest=False)
            run.write_state(RunState(RunStatus.FAILED, state.versions if state else versions, str(error), files))
    except StorageError:
        return
