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

from agentrl import codec
from agentrl.types.episode import Episode, Node
from agentrl.types.errors import StorageError

_SPAN = pa.struct([("epoch", pa.int32()), ("step", pa.int64()), ("start", pa.int64()), ("end", pa.int64())])
_REPEATED = ["task_id", "started_at", "stop_reason", "failure", "outcome", "reason"]


@dataclass(frozen=True, slots=True)
class Consumed:
    """An episode and what became of it.

    `outcome` is ``trained``, and `step` the step that it helped to make, or ``dropped``, with a `reason`.
    """

    episode: Episode
    outcome: str
    reason: str | None
    step: int


Scalar = Callable[[Consumed], Any]
_SCALARS: dict[str, tuple[pa.DataType, Scalar]] = {
    "episode_id": (pa.string(), lambda row: row.episode.episode_id),
    "task_id": (pa.string(), lambda row: row.episode.ticket.task.id),
    "group": (pa.int64(), lambda row: row.episode.ticket.group),
    "member": (pa.int32(), lambda row: row.episode.ticket.member),
    "attempt": (pa.int32(), lambda row: row.episode.ticket.attempt),
    "seed": (pa.int64(), lambda row: row.episode.ticket.seed),
    "started_at": (pa.string(), lambda row: _started_at(row.episode)),
    "stop_reason": (pa.string(), lambda row: row.episode.stop_reason),
    "failure": (pa.string(), lambda row: None if row.episode.failure is None else str(row.episode.failure)),
    "reward": (pa.float64(), lambda row: row.episode.reward),
    "metrics": (pa.string(), lambda row: json.dumps(row.episode.metrics)),
    "seconds": (pa.float64(), lambda row: row.episode.seconds),
    "turns": (pa.int32(), lambda row: len(row.episode.turns)),
    "sampled_tokens": (pa.int64(), lambda row: row.episode.num_sampled_tokens),
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
        columns += _token_columns([row.episode.nodes for row in rows])
        columns.append(pa.array([codec.encode(row.episode) for row in rows], pa.binary()))
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
        StorageError: the file cannot be read, or holds no such episode.
    """
    try:
        with pq.ParquetFile(path) as file:
            record = _record(file, episode_id)
    except (OSError, pa.ArrowInvalid) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    if record is None:
        raise StorageError(f"{path} holds no episode {episode_id}; other files of its folder may")
    return codec.decode(record, Episode)


def _record(file: pq.ParquetFile, episode_id: str) -> bytes | None:
    for group in range(file.num_row_groups):
        names = file.read_row_group(group, columns=["episode_id"]).column(0).to_pylist()
        if episode_id in names:
            return file.read_row_group(group, columns=["record"]).column(0)[names.index(episode_id)].as_py()
    return None


def _started_at(episode: Episode) -> str:
    return json.dumps({policy: str(version) for policy, version in episode.ticket.started_at.items()})


def _token_columns(episodes: Sequence[tuple[Node, ...]]) -> list[pa.Array]:
    """The list columns of some episodes, each given by its nodes."""
    nodes = [node for of_episode in episodes for node in of_episode]
    lengths = [len(node.token_ids) for node in nodes]
    sampled = np.repeat([node.sample is not None for node in nodes], lengths)
    logprobs = [np.zeros(len(n.token_ids), np.float32) if n.sample is None else n.sample.logprobs for n in nodes]
    offsets = np.cumsum([0] + [sum(len(node.token_ids) for node in of_episode) for of_episode in episodes])
    values = {
        "token_ids": pa.array(_joined([node.token_ids for node in nodes]), pa.int32()),
        "sampled": pa.array(sampled.astype(bool)),
        "turn": pa.array(np.repeat([node.turn for node in nodes], lengths).astype(np.int32)),
        "logprobs": pa.array(_joined(logprobs).astype(np.float32), mask=~sampled.astype(bool)),
    }
    lists = [pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values[name]) for name in values]
    return [*lists, pa.array([_spans(of_episode) for of_episode in episodes], pa.list_(_SPAN))]


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)


def _spans(nodes: tuple[Node, ...]) -> list[dict[str, int]]:
    spans, at = [], 0
    for node in nodes:
        for span in node.sample.versions if node.sample else ():
            version = {"epoch": span.version.epoch, "step": span.version.step}
            spans.append({**version, "start": at + span.start, "end": at + span.end})
        at += len(node.token_ids)
    return spans
