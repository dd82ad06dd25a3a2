"""What a dialect is: how one kind of program asks, and how it is answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl.types.message import Message
from agentrl.types.program import CallRefusedError, ModelCall, ModelReply


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A call as a dialect read it, and how it wants to be answered.

    `overrides` names what the program asked for in vain: settings that the run's win over (``temperature``), that have
    no effect here (``response_format``), tools of a kind that is no function (``tools.web_search``), and
    ``unrecognized`` for fields that the dialect does not know. `namespaces` says for a tool that the program keeps in
    a namespace, by the one name that the policy knows it by, which namespace that is and the tool's name in it:
    ``{"agents.spawn": ("agents", "spawn")}``.
    """

    call: ModelCall
    is_streamed: bool
    overrides: tuple[str, ...]
    wants_usage: bool = False  # in a stream whose program must ask for it
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)


class Dialect(Protocol):
    """One wire format: pure functions from bytes to records and back."""

    name: str
    path: str
    over_status: int
    """Status with which programs are told that their episode takes no more calls: one that they never try again."""

    def read(self, body: bytes) -> ReadCall:
        """The call that a request's body asks for.

        Raises:
            CallRefusedError: it is no JSON or of a wrong shape, or asks for what no policy can give; names the place.
        """

    def answer(self, read: ReadCall, reply: ModelReply, call_id: str) -> dict[str, Any]:
        """The whole answer, built by the types of the official SDK."""

    def events(self, read: ReadCall, reply: ModelReply, call_id: str) -> Iterator[str]:
        """The same answer as server-sent events, in a few deltas."""

    def keep_alive(self, call_id: str) -> str:
        """A piece of a stream that says nothing; only before the first of `events`, and under the same id."""

    def error(self, refusal: CallRefusedError) -> dict[str, Any]:
        """The body of an error, whose status is the refusal's."""

    def error_event(self, refusal: CallRefusedError, call_id: str) -> str:
        """The same in a stream that has begun."""

    def echo(self, message: Message) -> Message:
        """The assistant message as `read` gives it when a program sends its answer back verbatim."""
