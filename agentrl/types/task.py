"""Tasks: one problem instance each, and the limits that the platform puts on solving it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Split(StrEnum):
    """Which half of an environment's tasks: the two share no task."""

    TRAIN = "train"
    HELDOUT = "heldout"


@dataclass(frozen=True, slots=True)
class Task:
    """One problem instance with whatever its environment needs to pose and to judge it.

    `ordinal` counts the tasks of a split from 0 and never repeats within an epoch. What has been trained is told by
    the numbers of groups instead, which go on through all epochs. `payload` is plain JSON: it crosses process borders.

    Example: ``Task("sql", Split.TRAIN, 7, {"seed": 1234})`` has the id ``sql/train/7``.
    """

    environment: str
    split: Split
    ordinal: int
    payload: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Name of the task, the same in every epoch."""
        return f"{self.environment}/{self.split}/{self.ordinal}"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one episode may use; the platform enforces them, not the environment or the scaffold.

    `max_sampled_tokens` bounds all replies of an agent together; None leaves that to turns and replies.
    """

    max_turns: int
    max_context_tokens: int
    max_reply_tokens: int
    tool_s: float
    total_s: float
    max_sampled_tokens: int | None = None
