"""A file of the archive: consumed episodes as Parquet, one row each, for tools that look at many.

The list columns hold all nodes of an episode behind one another in the order of their numbers, so each token is
there once; ``logprobs`` is null where nothing was sampled, and a version's span counts tokens of the row. Which
node continues which, kept sets and routed experts are in ``record`` alone.

The record is the exact episode: those of its entries that an `Episode` is made of, as the journal had them. Each keeps
the schema under which it was written, so a later program reads it by the same migrations as a journal. For each entry
there are ``schema u16, kind u16, length u32`` and the payload, little-endian. Entries of holders that had lost their
lease are left out, and so are those that only a worker needs that goes on with the episode.

A file's name has the digest of its bytes, and its pages have checksums, which Parquet's readers know.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl import codec
from agentrl.journal.archive_names import archive_files, digest_in_name
from agentrl.journal.entries import (
    NUMBERS,
    Ended,
    EpisodeEntry,
    Leased,
    PartialReply,
    Scored,
    StepResultRecorded,
    TurnCommitted,
    TurnScored,
    unpack,
)
from agentrl.journal.frames import Frame
from agentrl.journal.history import build_history
from agentrl.types.episode import Episode, Node
from agentrl.types.errors import StorageError

_HEAD = struct.Struct("<HHI")
_REMEDY = "restore the file from a copy, or move it away: its episodes are then missing in replays and analyses"
_KEPT = frozenset(NUMBERS[kind] for kind in (Leased, TurnCommitted, StepResultRecorded, Scored, TurnScored, Ended))
_PART = NUMBERS[PartialReply]
_WITH_PARTS = frozenset(NUMBERS[kind] for kind in (TurnCommitted, Ended))
_SPAN = pa.struct([("epoch", pa.int32()), ("step", pa.int64()), ("start", pa.int64()), ("end", pa.int64())])
_TRAINED = ("outcome", "=", "trained")
_REPEATED = ["task_id", "started_at", "stop_reason", "failure", "outcome", "reason"]


@dataclass(frozen=True, slots=True)
class Consumed:
    """An episode that is final, its exact record, and what became of it.

    `outcome` is ``trained``, and `step` the step that it helped to make, or ``dropped``, with a `reason`.
    """

    episode: Episode
    record: bytes
    outcome: str
    reason: str | None
    step: int


Scalar = Callable[[Consumed], Any]
_SCALARS: dict[str, tuple[pa.DataType, Scalar]] = {
    "episode_id": (pa.string(), lambda row: row.episode.ticket.episode_id),
    "task_id": (pa.string(), lambda row: row.episode.ticket.task.id),
    "environment": (pa.string(), lambda row: row.episode.ticket.environment),
    "group": (pa.int64(), lambda row: row.episode.ticket.group),
    "member": (pa.int32(), lambda row: row.episode.ticket.member),
    "attempt": (pa.int32(), lambda row: row.episode.ticket.attempt),
    "seed": (pa.int64(), lambda row: row.episode.ticket.seed),
    "started_at": (pa.string(), lambda row: _started_at(row.episode)),
    "stop_reason": (pa.string(), lambda row: row.episode.stop_reason),
    "failure": (pa.string(), lambda row: None if (failed := row.episode.failure) is None else str(failed)),
    "reward": (pa.float64(), lambda row: row.episode.reward),
    "agent_rewards": (pa.string(), lambda row: json.dumps(row.episode.agent_rewards)),
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
            path,
            SCHEMA.with_metadata(metadata),
            compression="zstd",
            use_dictionary=_REPEATED,
            write_statistics=True,
            write_page_checksum=True,
        )

    def __enter__(self) -> ConsumedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, rows: Sequence[Consumed]) -> None:
        """Append episodes. Raises OSError."""
        columns = [pa.array([of(row) for row in rows], kind) for kind, of in _SCALARS.values()]
        columns += _token_columns([row.episode.nodes for row in rows])
        columns.append(pa.array([row.record for row in rows], pa.binary()))
        self._file.write_table(pa.Table.from_arrays(columns, schema=self._file.schema))


def read_metadata(path: Path) -> dict[str, str]:
    """What stands in a file's footer. Raises StorageError."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowInvalid) as error:
        raise StorageError(f"{path} is no archive of episodes: {error}; {_REMEDY}") from error
    return {name.decode(): value.decode() for name, value in metadata.items()}


def record_of(frames: Iterable[Frame]) -> bytes:
    """The record of an episode, from the frames of those of its entries that count, in order.

    Parts of a reply are left out once its turn, or the episode's end, has them.
    """
    kept: list[Frame] = []
    parts: list[Frame] = []
    for frame in frames:
        if frame.kind in _WITH_PARTS:
            parts = []
        if frame.kind in _KEPT:
            kept.append(frame)
        elif frame.kind == _PART:
            parts.append(frame)
    pieces = ((_HEAD.pack(frame.schema, frame.kind, len(frame.payload)), frame.payload) for frame in (*kept, *parts))
    return b"".join(piece for pair in pieces for piece in pair)


def episode_of(record: bytes) -> Episode:
    """The episode as it was, to the bit.

    Raises:
        StorageError: the record is none, or was written by a newer program.
    """
    history = build_history(list(_entries(record)))
    if history is None:
        raise StorageError("an archived episode's record has no lease")
    return history.episode()


def check_file(path: Path) -> None:
    """Whether a file is as it was written. One of an older program, without a digest in its name, is read as a whole.

    Raises:
        StorageError: it is not.
    """
    digest = digest_in_name(path)
    if digest is None:
        _table(path, SCHEMA.names, [])
        return
    try:
        is_whole = codec.file_digest(path).startswith(digest)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}; {_REMEDY}") from error
    if not is_whole:
        raise StorageError(f"{path} is damaged: it has other bytes than were written; {_REMEDY}")


def archived_steps(folder: Path) -> dict[int, Path]:
    """Steps whose episodes are in the archive, and the file of each. Raises StorageError."""
    steps: dict[int, Path] = {}
    for path in archive_files(folder):
        table = _table(path, ["step"], [_TRAINED])
        steps |= dict.fromkeys(table.column("step").unique().to_pylist(), path)
    return steps


def read_step(path: Path, step: int) -> list[Episode]:
    """The episodes that a step trained, in the order of its batch, to the bit. Raises StorageError."""
    check_file(path)
    table = _table(path, ["record"], [_TRAINED, ("step", "=", step)])
    return [episode_of(record) for record in table.column("record").to_pylist()]


def read_consumed(path: Path) -> list[Episode]:
    """All episodes of a file, trained and dropped, in their order. Raises StorageError."""
    check_file(path)
    return [episode_of(record) for record in _table(path, ["record"], []).column("record").to_pylist()]


def _table(path: Path, columns: list[str], filters: list[tuple[str, str, object]]) -> pa.Table:
    try:
        return pq.read_table(path, columns=columns, filters=filters or None, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{path} cannot be read: {error}; {_REMEDY}") from error


def _entries(record: bytes) -> Iterator[EpisodeEntry]:
    at = 0
    while at < len(record):
        try:
            schema, kind, length = _HEAD.unpack_from(record, at)
        except struct.error as error:
            raise StorageError(f"an archived episode's record ends within a header: {error}") from error
        at += _HEAD.size + length
        yield unpack(schema, kind, record[at - length : at])


def _started_at(episode: Episode) -> str:
    return json.dumps({policy: str(version) for policy, version in episode.ticket.started_at.items()})


def _token_columns(episodes: Sequence[Sequence[Node]]) -> list[pa.Array]:
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


def _joined(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """Arrays behind one another."""
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype, casting="unsafe")


def _versions(episodes: Sequence[Sequence[Node]]) -> pa.Array:
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
