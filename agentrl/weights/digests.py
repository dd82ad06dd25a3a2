"""Digests of the files of a folder of weights, by which whoever goes on from it finds damage before it does.

They tell files apart that a disk has damaged, not files that somebody forged.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from agentrl import codec
from agentrl.types.errors import StorageError

DIGESTS = "digests.json"
PROGRESS = "progress.json"


def digests_of(folder: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """The digest of every file below a folder by its path in it, but for what says how far a run had come.

    What is in `known` is not read again. Raises OSError.
    """
    known = known or {}
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {name: known.get(name) or codec.file_digest(folder / name) for name in names if not _is_apart(name)}


def write_digests(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Put the digests of a folder's files beside them. Raises OSError."""
    (folder / DIGESTS).unlink(missing_ok=True)
    text = codec.seal(json.dumps(digests_of(folder, known)).encode())
    (folder / DIGESTS).write_bytes(text + b"\n")


def damage_of(folder: Path, digests: Mapping[str, str], names: Collection[str] | None = None) -> str | None:
    """Which file of a folder, of all or of some, is not as its digest has it, in words; None if all are."""
    for name, digest in digests.items():
        if names is not None and name not in names:
            continue
        path = folder / name
        try:
            if codec.file_digest(path) != digest:
                return f"{path} has other bytes than were written"
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read: {error}"
    return None


def check_folder(folder: Path, names: Collection[str] | None = None) -> None:
    """Whether the files of a folder, all or some, are as they were written; one without digests is another program's.

    Raises:
        StorageError: one is not.
    """
    file = folder / DIGESTS
    if not file.is_file():
        return
    try:
        digests: dict[str, str] = json.loads(codec.unseal(file.read_bytes()))
    except (OSError, ValueError) as error:
        raise StorageError(f"{file} is damaged: {error}; restore it from a copy, or remove {folder}") from None
    if damage := damage_of(folder, digests, names):
        raise StorageError(f"weights are damaged: {damage}; restore the file from a copy, or remove {folder}")


def _is_apart(name: str) -> bool:
    return name.startswith(PROGRESS)
