"""Folders of process-reward models, which are replaced by newer ones while others read them.

Beside the files of any model lies a marker with their digests. It is written last, by a rename: whoever finds a marker
whose version is another than the one that was loaded loads the folder anew, and whoever loads while files are being
replaced finds that they are not those of the marker. Nobody ever computes with the files of two versions.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl import codec
from agentrl.types.errors import StorageError

MARKER = "reward.json"
_DIGITS = 12


class FolderChangingError(StorageError):
    """Files of a folder are not those that its marker names: they are being replaced, or are damaged."""


@dataclass(frozen=True, slots=True)
class RewardVersion:
    """Which reward model a folder has: `name` is a digest of `digests`, those of its files by their names.

    Example: ``RewardVersion("4f1a09c2be77", {"model.safetensors": "8c1a...", "config.json": "02d9..."})``.
    """

    name: str
    digests: dict[str, str]


def stated_version(folder: Path) -> RewardVersion | None:
    """What the marker of a folder says; None without a marker. Raises StorageError if it is damaged."""
    file = folder / MARKER
    try:
        return codec.from_json(codec.unseal(file.read_bytes()), RewardVersion)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StorageError(f"{file} is damaged: {error}; fit the model again with `agentrl prm train`") from error


def found_version(folder: Path) -> RewardVersion:
    """What the files of a folder are. Raises StorageError."""
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MARKER)
        return _version({path.name: codec.file_digest(path) for path in files})
    except OSError as error:
        raise StorageError(f"the model in {folder} cannot be read: {error}") from error


def check_files(folder: Path, version: RewardVersion) -> None:
    """Whether the folder has the files of a version. Raises FolderChangingError."""
    found = found_version(folder).digests
    wrong = next((name for name, digest in version.digests.items() if found.get(name) != digest), None)
    if wrong is not None:
        raise FolderChangingError(
            f"{folder / wrong} is not the file that {MARKER} names: the model is being replaced, or was damaged; fit "
            "it again with `agentrl prm train`"
        )


def replace_reward_model(made: Path, folder: Path) -> RewardVersion:
    """Bring a new model to its folder, over one that may lie there and be in use; `made` is gone then.

    Both lie on one disk. Blocks until it outlives a loss of power. Raises StorageError.
    """
    version = found_version(made)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (made / MARKER).write_bytes(codec.seal(codec.to_json(version)) + b"\n")
        names = [*version.digests, MARKER]
        for name in names:
            _sync(made / name)
        for name in names:
            (made / name).replace(folder / name)
        _sync(folder)
        for path in folder.iterdir():
            if path.is_file() and path.name not in names:
                path.unlink()
        shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"the model cannot be written to {folder}: {error}; free space, then fit it again"
        ) from error
    return version


def _version(digests: Mapping[str, str]) -> RewardVersion:
    text = json.dumps(sorted(digests.items()))
    return RewardVersion(hashlib.blake2b(text.encode()).hexdigest()[:_DIGITS], dict(digests))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
