"""What a journal says: one record for every transition that outlives its process.

Each entry's payload is the episode's key (8 bytes, 0 for entries of no single episode) and the record as
msgpack, so a reader can pass over episodes that do not concern it without decoding them. A rollout worker
writes what happens to episodes (`Leased` to `Ended`), the buffer what became of them (`Taken` to `Checkpointed`);
`Compacted` stands at the start of a segment that was made from others.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from agentrl import codec
from agentrl.types.environment import Opening, ScoreRecord, StepResult
from agentrl.types.episode import Agent, Effect, Node, StopReason, Ticket, Turn
from agentrl.types.errors import Failure, StorageError
from agentrl.types.generation import FinishReason, Generation
from agentrl.types.turn_score import TurnScore
from agentrl.types.version import PolicyVersion

SCHEMA = 2
_OLDEST = 2
NO_EPISODE = 0
NO_HOLDER = 0
"""Token of what is written of an episode once nobody plays it."""
_KEY = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Leased:
    """A worker plays an episode from here on, under a fencing token.

    `token` rises with every new holder. `taken_over` is the number of the episode's entries that the new
    holder found; what an older holder wrote behind them counts for nothing.
    """

    ticket: Ticket
    agents: tuple[Agent, ...]
    token: int
    taken_over: int = 0


@dataclass(frozen=True, slots=True)
class EnvironmentStarted:
    """The environment has posed the task; `handle` names its live session where it can be reattached.

    Another one says that another session has taken over, or with no handle that none can be reattached any more.
    """

    token: int
    opening: Opening
    handle: str | None = None


@dataclass(frozen=True, slots=True)
class PartialReply:
    """A part of a reply that an abort cut short; the next part, or the whole reply, comes behind it.

    `request` is the digest of the context that the whole reply continues. `agent` is empty where an older program
    wrote it.
    """

    token: int
    generation: Generation
    request: str
    agent: str = ""


@dataclass(frozen=True, slots=True)
class TurnCommitted:
    """A reply is complete.

    `nodes` are all that were added since the last turn, the reply's last. `request` is the digest of the context
    that the reply continues: a scaffold that is run again must come to the same.
    """

    token: int
    turn: Turn
    nodes: tuple[Node, ...]
    finish: FinishReason
    request: str


@dataclass(frozen=True, slots=True)
class Intended:
    """The environment is about to act on the last reply; `step` counts such calls, `effects` have no result yet."""

    token: int
    step: int
    effects: tuple[Effect, ...]


@dataclass(frozen=True, slots=True)
class StepResultRecorded:
    """The environment has acted; `snapshot` is its state afterwards where it can be restored from one."""

    token: int
    step: int
    effects: tuple[Effect, ...]
    result: StepResult
    seconds: float
    snapshot: bytes | None = None


@dataclass(frozen=True, slots=True)
class Judging:
    """A live session is about to be asked for its verdict, by the scorer of that name.

    Without a `Scored` of that scorer behind it nobody knows whether it was: that session is not asked again.
    """

    token: int
    scorer: str


@dataclass(frozen=True, slots=True)
class Scored:
    """A scorer has judged the episode, or failed to.

    It may come behind the end, from whoever looks after the scores then: `token` is `NO_HOLDER` there. Of several
    records of one scorer the last counts.
    """

    token: int
    record: ScoreRecord


@dataclass(frozen=True, slots=True)
class TurnScored:
    """A scorer has judged a turn, or failed to, perhaps while the episode was played on; `token` is `NO_HOLDER`.

    Of several of one scorer and turn the first counts: a state has one score. Its `Scored` comes behind all of them.
    """

    token: int
    scorer: str
    score: TurnScore


@dataclass(frozen=True, slots=True)
class Ended:
    """The episode is played to its end, or failed; nodes that no turn committed (none, as a rule) come with it.

    Its scores are records of their own, those of a live environment before this one, others behind it.
    """

    token: int
    stop_reason: StopReason | None
    failure: Failure | None
    seconds: float
    nodes: tuple[Node, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Taken:
    """A policy's step is about to train these groups, in this order, at this version.

    `policies` has, for each group, all policies that train it; empty says that this one alone does.

    Example: ``Taken("main", v3, ((7, ("train-000007-0", "train-000007-1")),))``.
    """

    policy: str
    version: PolicyVersion
    groups: tuple[tuple[int, tuple[str, ...]], ...]
    policies: tuple[tuple[str, ...], ...] = ()

    @property
    def step(self) -> int:
        """The step of the version that is trained."""
        return self.version.step


@dataclass(frozen=True, slots=True)
class Stepped:
    """A policy's step is done: its new version, and a digest of the weights, equal if the weights are."""

    policy: str
    version: PolicyVersion
    digest: str = ""

    @property
    def step(self) -> int:
        """The step of the version that was made."""
        return self.version.step


@dataclass(frozen=True, slots=True)
class Dropped:
    """These episodes of one group will never be trained; a group that is `whole` is done with."""

    group: int
    episodes: tuple[str, ...]
    reason: str
    step: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A policy will not train these episodes of a group, which others of its `policies` do."""

    policy: str
    group: int
    episodes: tuple[str, ...]
    reason: str
    policies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A checkpoint holds every step up to these, by policy: what they took, and what was dropped before, is final."""

    steps: dict[str, int]


@dataclass(frozen=True, slots=True)
class Compacted:
    """The segment that begins with this entry replaces every writer's segments up to a number.

    Example: ``Compacted({"worker-0": 7, "buffer": 2})``.
    """

    replaced: dict[str, int]


Entry = (
    Leased
    | EnvironmentStarted
    | PartialReply
    | TurnCommitted
    | Intended
    | StepResultRecorded
    | Judging
    | Scored
    | TurnScored
    | Ended
    | Taken
    | Stepped
    | Dropped
    | LeftOut
    | Checkpointed
    | Compacted
)
EpisodeEntry = (
    Leased
    | EnvironmentStarted
    | PartialReply
    | TurnCommitted
    | Intended
    | StepResultRecorded
    | Judging
    | Scored
    | TurnScored
    | Ended
)

KINDS: dict[int, type] = {
    1: Leased,
    2: EnvironmentStarted,
    3: PartialReply,
    4: TurnCommitted,
    5: Intended,
    6: StepResultRecorded,
    7: Ended,
    8: Scored,
    9: Judging,
    10: TurnScored,
    16: Taken,
    17: Stepped,
    18: Dropped,
    19: Checkpointed,
    20: Compacted,
    21: LeftOut,
}
NUMBERS = {kind: number for number, kind in KINDS.items()}

Migration = Callable[[dict[str, Any]], dict[str, Any]]
MIGRATIONS: dict[tuple[int, int], Migration] = {}
"""From (schema, kind) to the fields of the next schema; a kind that did not change has none."""


def episode_key(episode_id: str) -> int:
    """An episode's key in payloads."""
    return xxhash.xxh3_64_intdigest(episode_id.encode())


def pack(episode_id: str | None, entry: Entry) -> tuple[int, int, bytes]:
    """Schema, kind and payload of an entry."""
    key = NO_EPISODE if episode_id is None else episode_key(episode_id)
    return SCHEMA, NUMBERS[type(entry)], _KEY.pack(key) + codec.encode(entry)


def key_of(payload: bytes | memoryview) -> int:
    """The episode's key at the start of a payload."""
    key: int = _KEY.unpack_from(payload)[0]
    return key


def unpack(schema: int, kind: int, payload: bytes) -> Any:
    """The entry that `pack` wrote, brought to the present schema.

    Raises:
        StorageError: written by a newer or too old a program, or not an entry.
    """
    if schema > SCHEMA or kind not in KINDS:
        raise StorageError(
            f"the journal holds an entry of kind {kind} under schema {schema}; this program knows schemas up to "
            f"{SCHEMA}: install the version that wrote it"
        )
    if schema < _OLDEST:
        raise StorageError(
            f"the journal is of schema {schema}, and this program reads {_OLDEST} to {SCHEMA}: resume the run with the "
            "version that wrote it, or start a new one from its newest checkpoint"
        )
    body = payload[_KEY.size :]
    try:
        if schema < SCHEMA:
            body = _migrated(body, schema, kind)
        return codec.decode(body, KINDS[kind])
    except msgspec.DecodeError as error:
        raise StorageError(f"a journal entry of kind {kind} cannot be read: {error}") from error


def _migrated(body: bytes, schema: int, kind: int) -> bytes:
    fields = msgspec.msgpack.decode(body)
    for old in range(schema, SCHEMA):
        fields = MIGRATIONS.get((old, kind), dict)(fields)
    return msgspec.msgpack.encode(fields)
