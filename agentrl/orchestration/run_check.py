"""Reads every file of a run and says which are damaged or missing, each with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from agentrl.buffer.ledger import read_ledger
from agentrl.journal.archive_file import check_file
from agentrl.journal.archive_names import archive_files
from agentrl.journal.durable_offsets import verify_offsets
from agentrl.journal.reading import LiveSegments, all_segments, read_journal
from agentrl.journal.segments import read_segment
from agentrl.orchestration.checkpoint_files import checkpoint_damage
from agentrl.orchestration.run_directory import RunDirectory, RunState, progress_copy, read_episodes
from agentrl.orchestration.run_files import changes, losses
from agentrl.telemetry.json_lines import read_lines
from agentrl.types.errors import AgentRLError, ConfigError, StorageError
from agentrl.weights.digests import DIGESTS, PROGRESS, check_folder

_NO_STATE = "restore it from a copy; without it a resume goes on from the newest checkpoint and the journal"
_RESUME = "a resume makes it again from the one before"
_COPY = "restore it from a copy, or go on without: `agentrl resume RUN --salvage`"


def find_damage(run: RunDirectory) -> list[str]:
    """A line for each file that is damaged or missing; logs, pictures and TensorBoard's files are not looked at."""
    state: list[RunState | None] = []
    found = [*_errors(lambda: state.append(run.state()))]
    found += _errors(run.config)
    known = state[0] if state else None
    if known is None and not found and (run.journal.is_dir() or any(run.path.glob("checkpoints/*"))):
        found.append(f"{run.path / 'state.json'} is missing; {_NO_STATE}")
    found += _lines_of(run, known)
    found += _journal(run)
    for path in archive_files(run.path / "episodes"):
        found += _errors(partial(check_file, path))
    for folder in run.checkpoint_folders():
        found += _checkpoint(run, folder)
    return [*found, *_weights(run, known)]


def _errors(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except AgentRLError as error:
        yield str(error)


def _lines_of(run: RunDirectory, state: RunState | None) -> Iterator[str]:
    """Damage to files of lines, and what any file lacks of its former length."""
    if run.metrics.is_file():
        yield from _errors(partial(read_lines, run.metrics))
    if run.ledger.is_file():
        yield from _errors(partial(read_ledger, run.ledger))
    for path in sorted((run.path / "episodes").glob("*.jsonl")):
        yield from _errors(partial(read_episodes, path))
    if state is None:
        return
    yield from changes(run.path, state.files)
    try:
        keep_bytes = run.config().journal.keep_bytes
    except ConfigError:
        return
    yield from (f"{loss}; {_COPY}" for loss in losses(run.path, state.files, keep_bytes).values())


def _journal(run: RunDirectory) -> Iterator[str]:
    for path in all_segments(run.journal):
        yield from _errors(partial(_read_whole, path))
    yield from _errors(lambda: LiveSegments.of(run.journal).check_none_missing())
    try:
        newest, state = run.latest_checkpoint(), read_journal(run.journal)
    except StorageError:
        return
    if newest is not None:
        yield from _errors(lambda: verify_offsets(run.journal, newest.journal, state.torn_tails))


def _read_whole(segment: Path) -> None:
    for _ in read_segment(segment):
        pass


def _checkpoint(run: RunDirectory, folder: Path) -> Iterator[str]:
    """Damage to a checkpoint, or to what says how far the run had come; a resume takes that from its copy."""
    own, copy = folder / PROGRESS, progress_copy(folder)
    known = []
    for path in (own, copy):
        try:
            known.append(run.progress(path))
        except StorageError as error:
            yield str(error)
    progress = next(filter(None, known), None)
    if progress is None or not progress.digests:  # an older program made no copy
        return
    yield from (f"{path} is missing; a resume makes it again" for path in (own, copy) if not path.is_file())
    if (damage := checkpoint_damage(folder, progress)) is not None:
        yield f"checkpoint {folder} is damaged: {damage}; {_RESUME}"


def _weights(run: RunDirectory, state: RunState | None) -> Iterator[str]:
    """Damage to staged weights. A run of an older program has no digests of them."""
    for folder in sorted((run.path / "weights").glob("*/*.*")):
        if folder.name.endswith(".staging"):
            continue
        if not (folder / DIGESTS).is_file() and state is not None and state.files.digests:
            yield f"{folder / DIGESTS} is missing: nobody can tell whether its weights are whole; remove {folder}"
        yield from _errors(partial(check_folder, folder))
