"""The bytes of a journal: frames behind one another, each of which proves itself.

A frame is ``magic u16, schema u16, kind u32, length u32, checksum u64`` and then its payload, little-endian. The
checksum (XXH3) covers everything behind itself and the header before it, with the segment's identity and the
frame's place in the file mixed in: bytes of an older file that a block device brings back do not pass for new ones.

Behind every sync stands a mark, a frame of its own kind: all bytes before it had been synced when it was written.
What cannot be read before the newest mark is damage to acknowledged entries; what cannot be read behind it is the
torn tail of writes that nobody was told of, even if whole frames of the same writes follow (a disk may write them
in any order). A mark holds the segment's identity in clear, so frames prove themselves without a header too.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import xxhash

MAGIC = 0xA97E
MAX_PAYLOAD_BYTES = 256 * 2**20
MARK_KIND = 0xFFFF_FFFF
_HEAD = struct.Struct("<HHII")
_CHECKSUM = struct.Struct("<Q")
_IDENTITY = struct.Struct("<Q")
HEADER_BYTES = _HEAD.size + _CHECKSUM.size
MARK_BYTES = HEADER_BYTES + _IDENTITY.size
_MASK = 0xFFFFFFFFFFFFFFFF
_MAGIC_BYTES = MAGIC.to_bytes(2, "little")
_MARK_HEAD = _HEAD.pack(MAGIC, 0, MARK_KIND, _IDENTITY.size)


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One entry of a journal.

    Example: a frame of kind 3 under schema 1 whose payload is 5 bytes long takes 25 bytes; `end` is where the next
    one begins.
    """

    schema: int
    kind: int
    payload: bytes
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TornTail:
    """Where the readable part of a segment ends although bytes follow; none of these was acknowledged."""

    at: int
    reason: str


@dataclass(frozen=True, slots=True)
class Corruption:
    """Bytes `start` to `end` of a segment that were synced once and cannot be read now."""

    start: int
    end: int
    reason: str


def frame_bytes(identity: int, start: int, schema: int, kind: int, payload: bytes) -> bytes:
    """A frame as it stands at byte `start` of the segment `identity`. Raises ValueError if the payload is too long."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"an entry of {len(payload)} bytes is above the journal's {MAX_PAYLOAD_BYTES}")
    head = _HEAD.pack(MAGIC, schema, kind, len(payload))
    return head + _CHECKSUM.pack(_checksum(identity, start, head, payload)) + payload


def payload_bytes(head: bytes) -> int:
    """How long the payload behind a header is; 0 if it is none."""
    if len(head) < HEADER_BYTES:
        return 0
    magic, _, _, length = _HEAD.unpack_from(head)
    return length if magic == MAGIC and length <= MAX_PAYLOAD_BYTES else 0


def mark_bytes(identity: int, start: int) -> bytes:
    """A mark as it stands at byte `start` of the segment `identity`: all before it has been synced."""
    return frame_bytes(identity, start, 0, MARK_KIND, _IDENTITY.pack(identity))


def read_frames(
    identity: int, data: bytes | memoryview, start: int = 0, proven: int = 0
) -> Iterator[Frame | Corruption | TornTail]:
    """Frames of a segment's bytes in order, without the marks, and `Corruption` in place of what cannot be read.

    A `TornTail` comes last if the bytes do not end with a whole frame. `start` is the place of `data` in the segment;
    bytes before `proven`, a place in the segment too, are known to have been synced, whatever the marks say.
    """
    view, at = memoryview(data), 0
    end = proven - start
    has_looked = False
    while at < len(view):
        found = _parse(identity, view, at, start)
        if isinstance(found, Frame):
            at = found.end - start
            if found.kind != MARK_KIND:
                yield found
            continue
        if not has_looked:
            end, has_looked = max(end, _newest_mark(identity, view, at, start)), True
        if at >= end:
            yield TornTail(start + at, found)
            return
        behind = _next_frame(identity, view, at + 1, end, start)
        yield Corruption(start + at, start + behind, found)
        at = behind
    if at < end:
        yield Corruption(start + at, proven, "the file has been cut short")


def find_identity(data: bytes | memoryview, start: int) -> int | None:
    """The identity that the marks in a segment's bytes agree on; None if there is no mark."""
    view, raw = memoryview(data), bytes(data)
    found: Counter[int] = Counter()
    at = raw.find(_MARK_HEAD)
    while at >= 0:
        if len(raw) - at >= MARK_BYTES:
            (identity,) = _IDENTITY.unpack_from(raw, at + HEADER_BYTES)
            found[identity] += isinstance(_parse(identity, view, at, start), Frame)
        at = raw.find(_MARK_HEAD, at + 1)
    best = found.most_common(1)
    return best[0][0] if best and best[0][1] else None


def _parse(identity: int, view: memoryview, at: int, start: int) -> Frame | str:
    """The frame that begins at `at`, or why none does."""
    if len(view) - at < HEADER_BYTES:
        return "the file ends within a header"
    magic, schema, kind, length = _HEAD.unpack_from(view, at)
    if magic != MAGIC:
        return "no frame begins here"
    end = at + HEADER_BYTES + length
    if length > MAX_PAYLOAD_BYTES or end > len(view):
        return "the file ends within a payload"
    (checksum,) = _CHECKSUM.unpack_from(view, at + _HEAD.size)
    head, payload = bytes(view[at : at + _HEAD.size]), bytes(view[at + HEADER_BYTES : end])
    if checksum != _checksum(identity, start + at, head, payload):
        return "the checksum is wrong"
    return Frame(schema, kind, payload, start + at, start + end)


def _newest_mark(identity: int, view: memoryview, first: int, start: int) -> int:
    """Where the last mark stands from `first` on; `first` if there is none."""
    raw = bytes(view[first:])
    at = raw.rfind(_MARK_HEAD)
    while at >= 0 and isinstance(_parse(identity, view, first + at, start), str):
        at = raw.rfind(_MARK_HEAD, 0, at + len(_MARK_HEAD) - 1)
    return first + max(at, 0)


def _next_frame(identity: int, view: memoryview, first: int, end: int, start: int) -> int:
    """Where the next frame stands from `first` on; `end` if there is none before it."""
    raw = bytes(view[first:end])
    at = raw.find(_MAGIC_BYTES)
    while at >= 0 and isinstance(_parse(identity, view, first + at, start), str):
        at = raw.find(_MAGIC_BYTES, at + 1)
    return first + at if at >= 0 else end


def _checksum(identity: int, start: int, head: bytes, payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(head + payload, (identity + start) & _MASK)
