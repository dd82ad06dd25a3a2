"""What passes between the platform and an environment: messages, tools, a score."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from agentrl.types.errors import Boundary, EpisodeError, Failure
from agentrl.types.message import Message, ToolSpec

Placement = Literal["inline", "process"]


@dataclass(frozen=True, slots=True)
class Opening:
    """How an episode begins: the first messages and the tools that may be called.

    `agent` names whose turn it is where several agents act; None where one does.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    agent: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's answer to one assistant message.

    `messages` holds one tool message for each call, in order. With `is_done` the episode is over and
    no messages are needed. `agent` names whose turn comes next and whom the messages are for; None stands for the
    agent that has acted.
    """

    messages: tuple[Message, ...] = ()
    is_done: bool = False
    agent: str | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict on an episode; `reward` is None when it could not be judged, never 0 instead.

    `agent_rewards` has the reward of each agent where they are judged apart; an agent without one has `reward`.
    `turn_rewards` has rewards of single turns, by the turn's index; they add to the reward of the agent that took it.

    Example: ``Score(0.5, agent_rewards={"white": 1.0, "black": 0.0})``.
    """

    reward: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    agent_rewards: dict[str, float] = field(default_factory=dict)
    turn_rewards: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScoreRecord:
    """What one scorer said of an episode, whenever it did; without a score `failure` says why.

    `weight` is its part in the reward.

    Example: ``ScoreRecord("verifier", Score(1.0))`` and ``ScoreRecord("style", Score(0.5), weight=0.2)`` make 1.1.
    """

    scorer: str
    score: Score | None
    weight: float = 1.0
    failure: Failure | None = None


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
class EnvironmentDescription:
    """All that a run knows of an environment, told by a process that has imported it; the run's own does not.

    `recovery` has the tools that act outside, too. `num_tasks` is the number of training tasks under the run's options,
    None where they are endless. `placement` is ``inline`` if every call is short, by the author's word; `interpreter`
    the path of the Python that instances run in unless a recipe names another. `needs_sandbox` says that instances
    ask for sandboxes, `has_program` that they bring the program that plays them.

    Example: ``EnvironmentDescription("mail", Recovery(external_tools=frozenset({"send"})), num_tasks=1200)``.
    """

    name: str
    recovery: Recovery = Recovery()
    num_tasks: int | None = None
    placement: Placement = "process"
    interpreter: str | None = None
    needs_sandbox: bool = False
    has_program: bool = False


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
    """The score itself if its reward is None or finite and all other numbers are finite.

    A reward of NaN, infinity, ``"1"`` or ``True`` is a fault of the environment: nothing is coerced.

    Raises:
        EpisodeError: boundary environment, kind reward.
    """
    if not isinstance(value, Score):
        raise EpisodeError(Boundary.ENVIRONMENT, "reward", f"score() returned {value!r}, not a Score")
    numbers = [] if value.reward is None else [("reward", value.reward)]
    numbers += [(f"reward of agent {name}", reward) for name, reward in value.agent_rewards.items()]
    numbers += [(f"reward of turn {turn}", reward) for turn, reward in value.turn_rewards.items()]
    for name, number in [*numbers, *value.metrics.items()]:
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
