"""An archived episode's exact record: those of its entries that an `Episode` is made of, as the journal had them.

They are copied, not decoded and encoded again: archiving takes processor time from the engines and the trainer of a
small machine. And each keeps the schema under which it was written, so a later program reads it by the same
migrations as a journal. For each entry there are ``schema u16, kind u16, length u32`` and the payload, little-endian.
Entries of holders that had lost their lease are left out, and so are those that only a worker needs that goes on with
the episode.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from agentrl.journal.entries import NUMBERS, Ended, EpisodeEntry, Leased, Resulted, Turned, unpack
from agentrl.journal.frames import Frame
from agentrl.journal.life import build_life
from agentrl.types.episode import Episode
from agentrl.types.errors import StorageError

_HEAD = struct.Struct("<HHI")
_KEPT = frozenset(NUMBERS[kind] for kind in (Leased, Turned, Resulted, Ended))


def record_of(frames: Iterable[Frame]) -> bytes:
    """The record of an episode, from the frames of those of its entries that count, in order."""
    pieces: list[bytes] = []
    for frame in frames:
        if frame.kind in _KEPT:
            pieces += (_HEAD.pack(frame.schema, frame.kind, len(frame.payload)), frame.payload)
    return b"".join(pieces)


def episode_of(record: bytes) -> Episode:
    """The episode as it was, to the bit.

    Raises:
        StorageError: the record is none, or was written by a newer program.
    """
    life = build_life(list(_entries(record)))
    if life is None:
        raise StorageError("an archived episode's record has no lease")
    return life.episode()


def _entries(record: bytes) -> Iterator[EpisodeEntry]:
    at = 0
    while at < len(record):
        try:
            schema, kind, length = _HEAD.unpack_from(record, at)
        except struct.error as error:
            raise StorageError(f"an archived episode's record ends within a header: {error}") from error
        at += _HEAD.size + length
        yield unpack(schema, kind, record[at - length : at])
