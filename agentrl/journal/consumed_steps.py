"""Which steps an archive holds, and what each of them trained."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.journal.archive import archive_files
from agentrl.journal.record import episode_of
from agentrl.types.episode import Episode
from agentrl.types.errors import StorageError

_TRAINED = ("outcome", "=", "trained")


def archived_steps(target: Path) -> dict[int, Path]:
    """Steps whose episodes are in the archive, and the file of each. Raises StorageError."""
    steps: dict[int, Path] = {}
    for path in archive_files(target):
        table = _table(path, ["step"], [_TRAINED])
        steps |= dict.fromkeys(table.column("step").unique().to_pylist(), path)
    return steps


def read_step(path: Path, step: int) -> list[Episode]:
    """The episodes that a step trained, in the order of its batch, to the bit. Raises StorageError."""
    table = _table(path, ["record"], [_TRAINED, ("step", "=", step)])
    return [episode_of(record) for record in table.column("record").to_pylist()]


def _table(path: Path, columns: list[str], filters: list[tuple[str, str, object]]) -> pa.Table:
    try:
        return pq.read_table(path, columns=columns, filters=filters)
    except (OSError, pa.ArrowInvalid) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
