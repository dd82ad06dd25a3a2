"""What goes to a rollout worker and what it tells: assignments in, events out."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.types.episode import Episode, Node, Ticket

PackedEntry = tuple[int, int, bytes]
"""Schema, kind and payload of an entry as the journal holds it."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """An episode for a worker to play, from its start or from where earlier holders put it on record.

    `token` rises with every hand-over of an episode, so that the order of its holders is never in doubt. `entries`
    are what counts of those that earlier holders wrote, in order. Of one that `is_traced` the worker writes spans.
    """

    ticket: Ticket
    token: int
    entries: tuple[PackedEntry, ...] = ()
    is_traced: bool = False


@dataclass(frozen=True, slots=True)
class TurnPlayed:
    """A reply is complete and on record; it is durable before anything follows from it.

    `nodes` are those of its turn, the reply's last, without what a trainer needs of sampled tokens.
    """

    episode_id: str
    token: int
    turn: int
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class PlaceFreed:
    """The episode generates no more; its score may still be on the way."""

    episode_id: str
    token: int


@dataclass(frozen=True, slots=True)
class EpisodeFinished:
    """The episode is over, scored or failed, and its end is durable."""

    episode_id: str
    token: int
    episode: Episode


@dataclass(frozen=True, slots=True)
class EpisodeLeft:
    """The episode is parked: all of it is on record, and any worker may go on from there."""

    episode_id: str
    token: int


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker cannot go on, nor could another: `error` is the name of what was raised, such as StorageError."""

    error: str
    message: str


WorkerEvent = TurnPlayed | PlaceFreed | EpisodeFinished | EpisodeLeft | WorkerFailed
EpisodeEvent = TurnPlayed | PlaceFreed | EpisodeFinished | EpisodeLeft
