"""Folders that appear under their name only when they are complete."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from agentrl.types.errors import StorageError
from agentrl.types.version import PolicyVersion


@contextmanager
def new_folder(folder: Path, version: PolicyVersion) -> Iterator[Path]:
    """A folder to write to, which takes the place of `folder` when the block ends well.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    staging = folder.with_name(folder.name + ".staging")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        yield staging
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    except (OSError, SafetensorError) as error:
        message = f"weights {version} cannot be written to {folder}: {error}; free space, then resume the run"
        raise StorageError(message) from error
