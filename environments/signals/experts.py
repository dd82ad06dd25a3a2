"""Scripted players of the signals environment, each of which plays speaker and listener: the floor and the ceiling."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentrl.types.message import Message, Role
from agentrl.types.task import Task
from agentrl_environments.signals.environment import heard
from agentrl_environments.signals.tasks import OBJECTS, WORDS, SignalsOptions

HESITANT_SHARE = 0.5
"""How often the hesitant expert does what the fluent one does; else it says any word, or names any of the objects."""


def act_fluent(options: SignalsOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """The object's own word as the speaker; as the listener the object that the word stands for, or any."""
    candidates = task.payload["candidates"]
    if _speaks(task, messages):
        return Message(Role.ASSISTANT, _word(task.payload["target"]))
    meant = [name for name in candidates if messages[0] == heard(_word(name), candidates)]
    return Message(Role.ASSISTANT, rng.choice(meant or candidates))


def act_hesitant(options: SignalsOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Every other time as the fluent expert, else anything that is allowed: right about every other time."""
    if rng.random() < HESITANT_SHARE:
        return act_fluent(options, task, messages, rng)
    legal = WORDS[: options.num_objects] if _speaks(task, messages) else task.payload["candidates"]
    return Message(Role.ASSISTANT, rng.choice(legal))


def _word(name: str) -> str:
    return WORDS[OBJECTS.index(name)]


def _speaks(task: Task, messages: Sequence[Message]) -> bool:
    """Whether the conversation is the speaker's."""
    return messages[0] == Message(Role.USER, task.payload["target"])
