"""Where an engine finds new weights, and what a pause does to its requests meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum


class PauseMode(StrEnum):
    """What becomes of requests in flight: given back, put back in the queue, frozen; or let finish before the pause.

    Servers know the first three. Draining is done on this side: no request is sent any more, and what still runs at a
    deadline is given back.
    """

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"
    DRAIN = "drain"

    @property
    def of_server(self) -> PauseMode:
        """The mode in which a server is asked to pause."""
        return PauseMode.ABORT if self is PauseMode.DRAIN else self

    @property
    def flushes_cache(self) -> bool:
        """Whether new weights empty the KV cache; requests that are frozen in place go on with theirs."""
        return self is not PauseMode.IN_PLACE


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel together, in order.

    Example: ``Bucket(("a", "b"), ("float32", "float32"), ((2, 3), (4,)), 40)``.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FolderWeights:
    """Safetensors in a folder that the engine can read."""

    path: str


@dataclass(frozen=True, slots=True)
class MappedWeights:
    """Memory that the engine can map: for each bucket one payload for each of the engine's ranks."""

    payloads: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class BroadcastWeights:
    """Buckets that come through a group that the engine has joined.

    `send` broadcasts the bucket of an index and returns when it has left; it raises EngineError.
    """

    group: str
    buckets: tuple[Bucket, ...]
    send: Callable[[int], Awaitable[None]]


WeightSource = FolderWeights | MappedWeights | BroadcastWeights


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A group for broadcasts of rank 0, the sender, and the ranks of one engine."""

    name: str
    backend: str
    address: str
    port: int
    world_size: int
