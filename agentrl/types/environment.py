"""What passes between the platform and an environment: messages, tools, a score."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.message import Message, ToolSpec


@dataclass(frozen=True, slots=True)
class Opening:
    """How an episode begins: the first messages and the tools that may be called."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's answer to one assistant message.

    `messages` holds one tool message for each call, in order. With `is_done` the episode is over and
    no messages are needed.
    """

    messages: tuple[Message, ...] = ()
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict on an episode; `reward` is None when it could not be judged, never 0 instead."""

    reward: float | None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recovery:
    """How the state of an environment can be had again after its worker is gone, by its author's declaration.

    Tried in this order: `has_handles` says that its sessions outlive a worker and can be reattached;
    `has_snapshots` that it can be restored from a snapshot taken after a step; `is_deterministic` that the same
    actions in a fresh instance give the same results. Calls of `external_tools` act outside the instance and
    are never repeated.
    """

    has_handles: bool = False
    has_snapshots: bool = False
    is_deterministic: bool = False
    external_tools: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Origin:
    """What an environment is made from instead of afresh: a live session's handle, or a snapshot.

    `token` is the fencing token of the worker that makes it: it rises with every new holder of the episode.
    """

    handle: str | None = None
    snapshot: bytes | None = None
    token: int = 0


def check_opening(value: object) -> Opening:
    """The opening itself if it is one. Raises EpisodeError (boundary environment, kind answer)."""
    if not isinstance(value, Opening):
        raise _breach(f"start() returned {type(value).__name__}, not an Opening")
    if not value.messages:
        raise _breach("the opening has no messages")
    _check_messages(value.messages)
    return value


def check_step(value: object) -> StepResult:
    """The step result itself if it is one. Raises EpisodeError (boundary environment, kind answer)."""
    if not isinstance(value, StepResult):
        raise _breach(f"step() returned {type(value).__name__}, not a StepResult")
    if not value.messages and not value.is_done:
        raise _breach("step() returned neither messages nor the end of the episode")
    _check_messages(value.messages)
    return value


def check_score(value: object) -> Score:
    """The score itself if its reward is None or finite and its metrics are finite.

    A reward of NaN, infinity, ``"1"`` or ``True`` is a fault of the environment: nothing is coerced.

    Raises:
        EpisodeError: boundary environment, kind reward.
    """
    if not isinstance(value, Score):
        raise EpisodeError(Boundary.ENVIRONMENT, "reward", f"score() returned {value!r}, not a Score")
    rewards = [] if value.reward is None else [("reward", value.reward)]
    for name, number in [*rewards, *value.metrics.items()]:
        if type(number) not in (int, float) or not math.isfinite(number):
            raise EpisodeError(Boundary.ENVIRONMENT, "reward", f"{name} is {number!r}, not a finite number")
    return value


def _check_messages(messages: object) -> None:
    if not isinstance(messages, tuple):
        raise _breach(f"messages must be a tuple, not {type(messages).__name__}")
    for message in messages:
        if not isinstance(message, Message) or not isinstance(message.content, str):
            raise _breach(f"{message!r} is not a Message with text")


def _breach(message: str) -> EpisodeError:
    return EpisodeError(Boundary.ENVIRONMENT, "answer", message)
