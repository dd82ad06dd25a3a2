"""What a run's small files were when its state was last written, and what a resume makes of them now."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl import codec
from agentrl.journal.archive_names import archive_files, number_of_file
from agentrl.journal.disk import sync_path
from agentrl.orchestration.tally import metric_prefix
from agentrl.telemetry.json_lines import read_lines
from agentrl.types.errors import StorageError

_log = logging.getLogger(__name__)
_CONSTANT = ("config.json", "mark")
_ROWS = ("metrics.jsonl", "ledger.jsonl", "episodes/train.jsonl", "episodes/heldout.jsonl", "episodes/failed.jsonl")


@dataclass(frozen=True, slots=True)
class FileMarks:
    """By which a later command finds that a file has lost its end, or is gone.

    `sizes` are bytes by path in the run's folder: files only grow, but for those that a resume cuts. Journal segments
    are among them only once nothing writes or compacts these any more; of a claim its name alone counts. `digests` are
    of files that nothing changes.

    Example: ``FileMarks({"metrics.jsonl": 5120}, {"config.json": "8c1a..."})``; empty of an older program's state.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


def marks_now(folder: Path, is_at_rest: bool) -> FileMarks:
    """The marks of a run's folder as it is. Raises StorageError."""
    paths = [folder / name for name in _ROWS]
    paths += archive_files(folder / "episodes")
    paths += (folder / "journal").glob("*.journal") if is_at_rest else ()
    try:
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in paths if path.is_file()}
        sizes |= {str(path.relative_to(folder)): 0 for path in (folder / "journal").glob("claim-*.json")}
        constant = [name for name in _CONSTANT if (folder / name).is_file()]
        return FileMarks(sizes, {name: codec.file_digest(folder / name) for name in constant})
    except OSError as error:
        raise StorageError(f"{folder} cannot be read: {error}") from error


def loss_of(folder: Path, marks: FileMarks, name: str) -> str | None:
    """What a file lacks of what the marks know, in words that begin with its path; None if nothing."""
    path, known_bytes = folder / name, marks.sizes.get(name, 0)
    if not path.is_file():
        return f"{path} is missing (it had {known_bytes} bytes)" if name in marks.sizes else None
    lost_bytes = known_bytes - path.stat().st_size
    return f"{path} lacks {lost_bytes} of {known_bytes} bytes" if lost_bytes > 0 else None


def losses(folder: Path, marks: FileMarks, keep_bytes: int) -> dict[str, str]:
    """`loss_of` of all files that lack something, by their names.

    The oldest files of the archive may be gone where it had outgrown `keep_bytes`.
    """
    found = {name: loss for name in marks.sizes if (loss := loss_of(folder, marks, name)) is not None}
    present = archive_files(folder / "episodes")
    oldest = number_of_file(present[0]) if present else 0
    archive = {name: size for name, size in marks.sizes.items() if name.endswith(".parquet")}
    present_bytes = sum(path.stat().st_size for path in present)
    for name, size in archive.items():
        is_old = not (folder / name).is_file() and number_of_file(Path(name)) < oldest
        if is_old and present_bytes + size > keep_bytes:
            found.pop(name, None)
    return found


def restore_claims(folder: Path, marks: FileMarks) -> None:
    """Make the newest claim on the journal again if it is gone: its number puts what every start wrote in order.

    Raises:
        StorageError: it cannot be written.
    """
    newest = max((name for name in marks.sizes if "/claim-" in name), default=None)
    if newest is None or any(path.name >= Path(newest).name for path in (folder / "journal").glob("claim-*.json")):
        return
    try:
        (folder / newest).touch()
        sync_path((folder / newest).parent)
    except OSError as error:
        raise StorageError(
            f"{folder / newest} cannot be made again: {error}; free space, then resume the run"
        ) from error
    _log.warning("%s is missing: it is made again, empty, since its number is what counts", folder / newest)


def changes(folder: Path, marks: FileMarks) -> list[str]:
    """Files that nothing but a person changes and that are others than when the marks were made, in words."""
    found = []
    for name, digest in marks.digests.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing; restore it from a copy")
        elif codec.file_digest(path) != digest:
            found.append(f"{path} has changed since the run went on last; unless you edited it, restore it from a copy")
    return found


def take_back_metrics(metrics: Path, steps: Mapping[str, int]) -> None:
    """Take rows behind a policy's step out of the metrics: the run does these steps again and writes them then.

    Raises:
        StorageError: the file is damaged, or cannot be written.
    """
    if not metrics.is_file():
        return
    prefixes = {metric_prefix(policy, list(steps)): step for policy, step in steps.items()}
    lines = read_lines(metrics)
    kept = [line for line in lines if not _is_behind(line, prefixes)]
    if len(kept) == len(lines):
        return
    draft = metrics.with_suffix(".jsonl.new")
    try:
        draft.write_bytes(b"".join(codec.seal(line) + b"\n" for line in kept))
        sync_path(draft)
        draft.replace(metrics)
    except OSError as error:
        raise StorageError(f"{metrics} cannot be written: {error}; free space, then resume the run") from error
    _log.warning("%s: %d rows of steps that are done anew are taken out", metrics, len(lines) - len(kept))


def _is_behind(line: bytes, prefixes: Mapping[str, int]) -> bool:
    """Whether a row is of a later step than its policy's, whose metrics begin with a prefix."""
    row = json.loads(line)
    names = row.keys() - {"step", "time"}
    own = (step for prefix, step in prefixes.items() if any(name.startswith(prefix) for name in names))
    return any(row["step"] > step for step in own)
