"""The native protocol of environment servers: calls and answers, the same by WebSocket and between a server's workers.

A text frame is JSON, a binary one msgpack; the answer comes as the call did. On one connection a call follows the
answer to the one before. Nothing belongs to a connection: a session outlives it, and is named by every call. A call
that is sent again under its id, by whichever connection, gets the first answer and does nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from agentrl.types.environment import EnvironmentDescription, Opening, Score, StepResult
from agentrl.types.errors import Boundary, EpisodeError, Failure
from agentrl.types.message import Message
from agentrl.types.task import Split, Task

PROTOCOL, VERSION = "agentrl-environment", 1
CONNECT_PATH = "/connect"


class Hello(msgspec.Struct, frozen=True):
    """What a server says first: the number of the process that answers, and how many more sessions there may be."""

    protocol: str
    version: int
    agentrl: str
    worker: int
    environments: tuple[str, ...]
    free: int
    max_message_bytes: int


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="method"):
    """A call; `id` is unique among all calls of all clients."""

    id: str


class Describe(Request, frozen=True, kw_only=True, tag="describe"):
    """What is to be known of an environment."""

    environment: str


class Sample(Request, frozen=True, kw_only=True, tag="sample"):
    """Tasks of a split, by ordinal."""

    environment: str
    split: Split
    seed: int
    ordinals: tuple[int, ...]


class Open(Request, frozen=True, kw_only=True, tag="open"):
    """A new session, fresh or from a snapshot, held under a fencing token.

    `worker` is the process that is to have it, None for the one that gets the call. A call that is sent again goes to
    the same.
    """

    environment: str
    task: Task
    snapshot: bytes | None = None
    token: int = 0
    worker: int | None = None


class SessionRequest(Request, frozen=True, kw_only=True):
    """A call for a session, by its holder: a token greater than any before it takes the session over."""

    session: str
    token: int = 0


class Attach(SessionRequest, frozen=True, kw_only=True, tag="attach"):
    """Take the session over, or find out whether it lives."""


class Start(SessionRequest, frozen=True, kw_only=True, tag="start"):
    """The environment's opening."""


class Step(SessionRequest, frozen=True, kw_only=True, tag="step"):
    """The environment's reaction to an assistant message."""

    action: Message


class GiveScore(SessionRequest, frozen=True, kw_only=True, tag="score"):
    """The environment's verdict."""


class Outcome(SessionRequest, frozen=True, kw_only=True, tag="outcome"):
    """What the session's last step gave, if it was the `step`-th, from 0, and its calls had these ids."""

    step: int
    effect_ids: tuple[str, ...]


class Snapshot(SessionRequest, frozen=True, kw_only=True, tag="snapshot"):
    """The environment's whole state."""


class Close(SessionRequest, frozen=True, kw_only=True, tag="close"):
    """End the session; one that is gone is no error."""


class OpenEnv(SessionRequest, frozen=True, kw_only=True, tag="openenv"):
    """What a client of OpenEnv wants of a session that it made by OpenEnv's protocol; `data` is JSON."""

    environment: str
    operation: str
    data: bytes = b"{}"


SessionCall = Attach | Start | Step | GiveScore | Outcome | Snapshot | Close
Call = Describe | Sample | Open | OpenEnv | SessionCall


class Opened(msgspec.Struct, frozen=True):
    """A new session's handle, and how many more the server takes."""

    session: str
    free: int


RESULTS: dict[type[Request], Any] = {
    Describe: EnvironmentDescription,
    Sample: list[Task],
    Open: Opened,
    Attach: None,
    Start: Opening,
    Step: StepResult,
    GiveScore: Score,
    Outcome: StepResult | None,
    Snapshot: bytes,
    Close: None,
    OpenEnv: dict[str, Any],
}
"""What each call gives."""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to the call `id`: a result, or why there is none; `retry_after_s` if it may be had later.

    A frame that could not be read is answered with an empty id.
    """

    id: str
    result: Any = None
    failure: Failure | None = None
    retry_after_s: float | None = None


class ReceivedAnswer(msgspec.Struct, frozen=True):
    """An answer whose result is not read yet: what it is depends on the call."""

    id: str
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    failure: Failure | None = None
    retry_after_s: float | None = None


class ServerBusyError(EpisodeError):
    """A server takes no more sessions now; nothing was done."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(Boundary.ENVIRONMENT, "busy", message)
        self.retry_after_s = retry_after_s


def lost(message: str) -> EpisodeError:
    """The session is gone."""
    return EpisodeError(Boundary.ENVIRONMENT, "lost", message)
