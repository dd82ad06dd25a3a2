"""Scripted players of Nim, each of which plays both agents: one that knows the rule, and one that knows only moves."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentrl.types.message import Message, Role
from agentrl.types.task import Task
from agentrl_environments.nim.environment import read_piles
from agentrl_environments.nim.tasks import NimOptions, best_move


def act_gold(options: NimOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Leave piles whose exclusive or is zero, where that can be done; else take one from the largest."""
    return _move(*best_move(read_piles(messages[-1])))


def act_beginner(options: NimOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Any move that is allowed, each as likely as the others."""
    rng.seed(f"{rng.random()}-{len(messages)}")  # the generator is the same at every move
    piles = read_piles(messages[-1])
    return _move(*rng.choice([(pile, taken + 1) for pile, number in piles.items() for taken in range(number)]))


def _move(pile: str, taken: int) -> Message:
    return Message(Role.ASSISTANT, f"{pile} {taken}")
