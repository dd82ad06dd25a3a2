"""What the archive's columns say of an episode, read from its entries and nothing else of them.

An entry is decoded into the few fields that a column shows, and an array stays the bytes that it came as: reading an
outline takes a fraction of what building the `Episode` takes, and nobody looks at the rest before `record` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from agentrl.journal.entries import NUMBERS, Ended, Leased, Turned
from agentrl.types.episode import Ticket
from agentrl.types.errors import Failure, StorageError
from agentrl.types.version import VersionSpan


class Column(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An array as the codec writes it; of one dimension wherever an outline has one."""

    dtype: str
    shape: list[int]
    data: bytes

    def __len__(self) -> int:
        return self.shape[0]


class SampleOutline(msgspec.Struct, frozen=True, gc=False):
    """Of `SampledColumns`."""

    logprobs: Column
    versions: list[VersionSpan]


class NodeOutline(msgspec.Struct, frozen=True, gc=False):
    """Of a `Node`."""

    turn: int
    token_ids: Column
    sample: SampleOutline | None


class EntryOutline(msgspec.Struct, frozen=True, gc=False):
    """Of an entry that no column shows anything of."""

    token: int


class LeasedOutline(EntryOutline, frozen=True, gc=False):
    """Of a `Leased`."""

    ticket: Ticket
    taken_over: int


class TurnedOutline(EntryOutline, frozen=True, gc=False):
    """Of a `Turned`."""

    nodes: list[NodeOutline]


class EndedOutline(EntryOutline, frozen=True, gc=False):
    """Of an `Ended`."""

    stop_reason: str | None
    failure: Failure | None
    reward: float | None
    metrics: dict[str, float]
    seconds: float
    nodes: list[NodeOutline]


NOT_ENDED = EndedOutline(0, None, None, None, {}, 0.0, [])


@dataclass(frozen=True, slots=True)
class Outline:
    """An episode as the archive's columns have it; `ended` is `NOT_ENDED` if it was given up while it was played.

    Example: two turns, dropped in the third: ``turns`` is 2 and ``nodes`` has four.
    """

    ticket: Ticket
    turns: int
    nodes: list[NodeOutline]
    ended: EndedOutline


_OTHER = msgspec.msgpack.Decoder(EntryOutline)
_DECODERS: dict[int, msgspec.msgpack.Decoder[EntryOutline]] = {
    NUMBERS[Leased]: msgspec.msgpack.Decoder(LeasedOutline),
    NUMBERS[Turned]: msgspec.msgpack.Decoder(TurnedOutline),
    NUMBERS[Ended]: msgspec.msgpack.Decoder(EndedOutline),
}


def outline_entry(kind: int, body: bytes) -> EntryOutline:
    """What the columns need of an entry of the present schema. Raises StorageError if it is none."""
    try:
        return _DECODERS.get(kind, _OTHER).decode(body)
    except msgspec.DecodeError as error:
        raise StorageError(f"a journal entry of kind {kind} cannot be read: {error}") from error


def outline_of(entries: Sequence[EntryOutline]) -> Outline:
    """An episode's outline from those of its entries that count, the first of which is a lease."""
    first = entries[0]
    assert isinstance(first, LeasedOutline)
    ticket, ended, turns, nodes = first.ticket, NOT_ENDED, 0, list[NodeOutline]()
    for entry in entries:
        if isinstance(entry, TurnedOutline):
            nodes += entry.nodes
            turns += 1
        elif isinstance(entry, LeasedOutline):
            ticket = entry.ticket
        elif isinstance(entry, EndedOutline):
            nodes += entry.nodes
            ended = entry
    return Outline(ticket, turns, nodes, ended)
