"""What clients and keeper say to each other: a WebSocket over a unix socket, msgpack, one call at a time.

Each call is one frame and has one answer. Behind `Write` and `Unpack` the client sends the content, before the answer
to `Read` and `Pack` the keeper does: frames of bytes, of which the last is empty. A connection is of one sandbox.
"""

from __future__ import annotations

import msgspec

from agentrl.types.errors import Failure
from agentrl.types.sandbox import Command, CommandResult, Guarantee, SandboxSpec

CHUNK_BYTES = 1 << 16
MOST_FRAME_BYTES = 1 << 26
SOCKET_VARIABLE = "AGENTRL_SANDBOXES"
"""Environment variable with the path of the keeper's socket, for the processes of a run."""


class Request(msgspec.Struct, frozen=True, tag_field="call"):
    """A call."""


class Describe(Request, frozen=True, tag="describe"):
    """What the backend guarantees."""


class Open(Request, frozen=True, tag="open"):
    """A new sandbox for this connection, empty or with the files of a snapshot; `beside` one that its caller has."""

    spec: SandboxSpec
    snapshot: str | None
    beside: str | None


class Attach(Request, frozen=True, tag="attach"):
    """A live sandbox for this connection, under a fencing token."""

    handle: str
    token: int


class Run(Request, frozen=True, tag="run"):
    """Run a command unless this effect is known."""

    command: Command
    effect_id: str


class Outcome(Request, frozen=True, tag="outcome"):
    """The result of an effect, if it is known."""

    effect_id: str


class Stop(Request, frozen=True, tag="stop"):
    """End a command of a sandbox that the caller has by another connection, on which the command is waited for."""

    handle: str
    token: int
    effect_id: str


class Write(Request, frozen=True, tag="write"):
    """Write a file from the frames that follow."""

    path: str


class Read(Request, frozen=True, tag="read"):
    """The content of a file as frames."""

    path: str


class Unpack(Request, frozen=True, tag="unpack"):
    """Unpack the tar archive that follows as frames."""

    folder: str


class Pack(Request, frozen=True, tag="pack"):
    """A folder as a tar archive, as frames."""

    folder: str


class Snapshot(Request, frozen=True, tag="snapshot"):
    """Keep the files under a name."""


class Forget(Request, frozen=True, tag="forget"):
    """Remove a snapshot."""

    snapshot: str


class Remember(Request, frozen=True, tag="remember"):
    """Keep some bytes beside the sandbox."""

    state: bytes


class Recall(Request, frozen=True, tag="recall"):
    """What was kept last."""


class Keep(Request, frozen=True, tag="keep"):
    """The handle is known to others: let the sandbox live on for them when this connection is gone."""


class Close(Request, frozen=True, tag="close"):
    """End the sandbox."""


Call = (
    Describe
    | Forget
    | Open
    | Attach
    | Run
    | Outcome
    | Stop
    | Write
    | Read
    | Unpack
    | Pack
    | Snapshot
    | Remember
    | Recall
    | Keep
    | Close
)


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a call gave, or the failure that it ran into."""

    failure: Failure | None = None
    result: CommandResult | None = None
    text: str | None = None
    """Of `Open` the handle, of `Snapshot` the name."""
    data: bytes | None = None
    guarantees: frozenset[Guarantee] = frozenset()
