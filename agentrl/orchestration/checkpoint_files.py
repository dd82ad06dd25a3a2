"""Finds damage to a run's checkpoints, and puts what is left of them in order before a resume reads them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from agentrl.journal.disk import sync_path
from agentrl.orchestration.run_directory import Progress, RunDirectory, progress_copy
from agentrl.types.errors import StorageError
from agentrl.weights.digests import PROGRESS, damage_of

_log = logging.getLogger(__name__)
_REMADE = "remade-"
_DAMAGED = "damaged-"


def checkpoint_damage(folder: Path, progress: Progress) -> str | None:
    """Which file of a checkpoint is not as it was written, in words; None if all are, or nobody knows."""
    return damage_of(folder, progress.digests)


def mend_checkpoints(run: RunDirectory) -> None:
    """Finish what a crash left of `replace_checkpoint`, and let a damaged ``progress.json`` be its copy again.

    Raises:
        StorageError: both are damaged, or cannot be written.
    """
    for remade in sorted((run.path / "checkpoints").glob(f"*/{_REMADE}[0-9]*")):
        folder = remade.with_name(remade.name.removeprefix(_REMADE))
        if (remade / PROGRESS).is_file():
            replace_checkpoint(folder, remade)
        else:
            shutil.rmtree(remade, ignore_errors=True)
    for folder in run.checkpoint_folders():
        _mend_progress(run, folder)


def _mend_progress(run: RunDirectory, folder: Path) -> None:
    own, copy = folder / PROGRESS, progress_copy(folder)
    found, error = _read(run, own)
    if found is not None:
        kept, _ = _read(run, copy)
        if kept != found:
            if found.digests:
                _log.warning("%s is not as it was written: it is made again from %s", copy, own)
            run.write_progress(folder, found)
        return
    kept, _ = _read(run, copy)
    if kept is None:
        raise error or StorageError(f"{own} and {copy} are damaged; restore one of them from a copy")
    _log.warning("%s is missing or damaged: it is taken from %s", own, copy)
    folder.mkdir(parents=True, exist_ok=True)
    run.write_progress(folder, kept)


def _read(run: RunDirectory, path: Path) -> tuple[Progress | None, StorageError | None]:
    try:
        return run.progress(path), None
    except StorageError as error:
        return None, error


def replace_checkpoint(folder: Path, remade: Path) -> None:
    """Let a complete checkpoint take the place of a damaged one of the same step, which is deleted.

    A crash leaves either of them under the name, or none, and `mend_checkpoints` to finish. Raises StorageError.
    """
    damaged = folder.with_name(f"{_DAMAGED}{folder.name}")
    try:
        shutil.rmtree(damaged, ignore_errors=True)
        if folder.exists():
            folder.rename(damaged)
        remade.rename(folder)
        sync_path(folder.parent)
    except OSError as error:
        raise StorageError(f"{folder} cannot be replaced: {error}; free space, then resume the run") from error
    shutil.rmtree(damaged, ignore_errors=True)


def folder_for_remake(folder: Path) -> Path:
    """An empty place beside a checkpoint that is to be made again."""
    remade = folder.with_name(f"{_REMADE}{folder.name}")
    shutil.rmtree(remade, ignore_errors=True)
    return remade


def put_aside_damaged(run: RunDirectory) -> None:
    """Rename checkpoints that are damaged, so that a salvage goes on from the one before. Raises StorageError."""
    for folder, progress in list(run.checkpoints()):
        damage = checkpoint_damage(folder, progress)
        if damage is None:
            continue
        aside = folder.with_name(f"{_DAMAGED}{folder.name}")
        _log.warning("checkpoint %s is damaged (%s): it is put aside as %s", folder, damage, aside)
        try:
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            progress_copy(folder).unlink(missing_ok=True)
            sync_path(folder.parent)
        except OSError as error:
            raise StorageError(f"{folder} cannot be renamed: {error}; see to the disk, then try again") from error
