"""Consumed episodes as Parquet: one row each, for tools that look at many, and the exact record beside it.

The list columns hold all nodes of an episode behind one another in the order of their numbers, so each token is
there once; ``logprobs`` is null where nothing was sampled, and a version's span counts tokens of the row. Which
node continues which, kept sets and routed experts are in ``record`` alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.journal.outline import Column, NodeOutline, Outline
from agentrl.journal.record import episode_of
from agentrl.types.episode import Episode, count_sampled_tokens
from agentrl.types.errors import StorageError

_SPAN = pa.struct([("epoch", pa.int32()), ("step", pa.int64()), ("start", pa.int64()), ("end", pa.int64())])
_REPEATED = ["task_id", "started_at", "stop_reason", "failure", "outcome", "reason"]


@dataclass(frozen=True, slots=True)
class Consumed:
    """An episode that is final: what the columns show of it, its exact record, and what became of it.

    `outcome` is ``trained``, and `step` the step that it helped to make, or ``dropped``, with a `reason`.
    """

    outline: Outline
    record: bytes
    outcome: str
    reason: str | None
    step: int


Scalar = Callable[[Consumed], Any]
_SCALARS: dict[str, tuple[pa.DataType, Scalar]] = {
    "episode_id": (pa.string(), lambda row: row.outline.ticket.episode_id),
    "task_id": (pa.string(), lambda row: row.outline.ticket.task.id),
    "group": (pa.int64(), lambda row: row.outline.ticket.group),
    "member": (pa.int32(), lambda row: row.outline.ticket.member),
    "attempt": (pa.int32(), lambda row: row.outline.ticket.attempt),
    "seed": (pa.int64(), lambda row: row.outline.ticket.seed),
    "started_at": (pa.string(), lambda row: _started_at(row.outline)),
    "stop_reason": (pa.string(), lambda row: row.outline.ended.stop_reason),
    "failure": (pa.string(), lambda row: None if (failed := row.outline.ended.failure) is None else str(failed)),
    "reward": (pa.float64(), lambda row: row.outline.ended.reward),
    "metrics": (pa.string(), lambda row: json.dumps(row.outline.ended.metrics)),
    "seconds": (pa.float64(), lambda row: row.outline.ended.seconds),
    "turns": (pa.int32(), lambda row: row.outline.turns),
    "sampled_tokens": (pa.int64(), lambda row: count_sampled_tokens(row.outline.nodes)),
    "outcome": (pa.string(), lambda row: row.outcome),
    "reason": (pa.string(), lambda row: row.reason),
    "step": (pa.int64(), lambda row: row.step),
}
_LISTS = {
    "token_ids": pa.int32(),
    "sampled": pa.bool_(),
    "turn": pa.int32(),
    "logprobs": pa.float32(),
    "versions": _SPAN,
}
SCHEMA = pa.schema(
    [
        *((name, kind) for name, (kind, _) in _SCALARS.items()),
        *((name, pa.list_(kind)) for name, kind in _LISTS.items()),
        ("record", pa.binary()),
    ]
)


class ConsumedWriter:
    """Writes rows to a Parquet file, a row group for each call; use as a context manager."""

    def __init__(self, path: Path, metadata: dict[str, str]) -> None:
        """`metadata` stands in the file's footer."""
        self._file = pq.ParquetWriter(
            path, SCHEMA.with_metadata(metadata), compression="zstd", use_dictionary=_REPEATED, write_statistics=True
        )

    def __enter__(self) -> ConsumedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, rows: Sequence[Consumed]) -> None:
        """Append episodes. Raises OSError."""
        columns = [pa.array([of(row) for row in rows], kind) for kind, of in _SCALARS.values()]
        columns += _token_columns([row.outline.nodes for row in rows])
        columns.append(pa.array([row.record for row in rows], pa.binary()))
        self._file.write_table(pa.Table.from_arrays(columns, schema=self._file.schema))


def read_metadata(path: Path) -> dict[str, str]:
    """What stands in a file's footer. Raises StorageError."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowInvalid) as error:
        raise StorageError(f"{path} is no archive of episodes: {error}; remove it") from error
    return {name.decode(): value.decode() for name, value in metadata.items()}


def read_archived(path: Path, episode_id: str) -> Episode:
    """The episode as it was, to the bit, from a file of the archive.

    Raises:
        StorageError: the file cannot be read, was written by a newer program, or holds no such episode.
    """
    try:
        with pq.ParquetFile(path) as file:
            record = _record(file, episode_id)
    except (OSError, pa.ArrowInvalid) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    if record is None:
        raise StorageError(f"{path} holds no episode {episode_id}; other files of its folder may")
    return episode_of(record)


def _record(file: pq.ParquetFile, episode_id: str) -> bytes | None:
    for group in range(file.num_row_groups):
        names = file.read_row_group(group, columns=["episode_id"]).column(0).to_pylist()
        if episode_id in names:
            record: bytes = file.read_row_group(group, columns=["record"]).column(0)[names.index(episode_id)].as_py()
            return record
    return None


def _started_at(episode: Outline) -> str:
    return json.dumps({policy: str(version) for policy, version in episode.ticket.started_at.items()})


def _token_columns(episodes: Sequence[Sequence[NodeOutline]]) -> list[pa.Array]:
    """The list columns of some episodes, each given by its nodes."""
    nodes = [node for of_episode in episodes for node in of_episode]
    lengths = [len(node.token_ids) for node in nodes]
    sampled = np.repeat(np.asarray([node.sample is not None for node in nodes], np.bool_), lengths)
    logprobs = np.zeros(len(sampled), np.float32)
    logprobs[sampled] = _joined([node.sample.logprobs for node in nodes if node.sample is not None], np.float32)
    values = {
        "token_ids": pa.array(_joined([node.token_ids for node in nodes], np.int32)),
        "sampled": pa.array(sampled),
        "turn": pa.array(np.repeat(np.asarray([node.turn for node in nodes], np.int32), lengths)),
        "logprobs": pa.array(logprobs, mask=~sampled),
    }
    offsets = _offsets([sum(len(node.token_ids) for node in of_episode) for of_episode in episodes])
    lists = [pa.ListArray.from_arrays(offsets, values[name]) for name in values]
    return [*lists, _versions(episodes)]


def _joined(columns: Sequence[Column], dtype: type[np.generic]) -> np.ndarray:
    """Columns behind one another; in one piece where all are of one type, as they are unless a program differed."""
    kinds = {column.dtype for column in columns}
    if len(kinds) == 1:
        return np.frombuffer(b"".join([column.data for column in columns]), kinds.pop()).astype(dtype, copy=False)
    pieces = [np.frombuffer(column.data, column.dtype).astype(dtype, copy=False) for column in columns]
    return np.concatenate([np.zeros(0, dtype), *pieces])


def _versions(episodes: Sequence[Sequence[NodeOutline]]) -> pa.Array:
    """Which version sampled which tokens of each row, by the places of these in the row."""
    spans: list[tuple[int, int, int, int]] = []
    counts = []
    for of_episode in episodes:
        at, before = 0, len(spans)
        for node in of_episode:
            for span in node.sample.versions if node.sample else ():
                spans.append((span.version.epoch, span.version.step, at + span.start, at + span.end))
            at += len(node.token_ids)
        counts.append(len(spans) - before)
    fields = np.asarray(spans, np.int64).reshape(-1, 4).T
    columns = [pa.array(values, field.type) for values, field in zip(fields, _SPAN, strict=True)]
    return pa.ListArray.from_arrays(_offsets(counts), pa.StructArray.from_arrays(columns, fields=list(_SPAN)))


def _offsets(counts: Sequence[int]) -> pa.Array:
    """Where each row's values begin, and where the last row's end."""
    return pa.array(np.cumsum([0, *counts], dtype=np.int32))
