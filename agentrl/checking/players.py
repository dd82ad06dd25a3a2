"""Who plays an environment without a trainer: chance, or an expert of its author."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from agentrl.checking.drawing import draw_arguments
from agentrl.config.base import ConfigModel
from agentrl.envs.definition import EnvironmentDefinition
from agentrl.types.message import Message, Role, ToolCall, ToolSpec
from agentrl.types.task import Task


class Player(Protocol):
    """Gives the next message of a conversation."""

    async def act(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        """The assistant's next message."""


MakePlayer = Callable[[Task, int], Player]
"""A player for a task; the number is the seed of its chance."""


class RandomPlayer:
    """Calls tools with arguments that their schemas allow, and now and then says a word that it has read."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    async def act(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        """A call four times of five where there are tools."""
        if tools and self._chance.random() < 0.8:
            chosen = self._chance.choice(tools)
            drawn = draw_arguments(chosen.parameters, self._chance)
            return Message(Role.ASSISTANT, tool_calls=(ToolCall(f"call-{len(messages)}", chosen.name, drawn),))
        words = [word for message in messages for word in message.content.split()]
        return Message(Role.ASSISTANT, self._chance.choice(words or [""]))


class ExpertPlayer:
    """An expert that the environment's author wrote."""

    def __init__(
        self, definition: EnvironmentDefinition[ConfigModel], options: ConfigModel, expert: str, task: Task, seed: int
    ) -> None:
        self._act = definition.expert(expert).act
        self._options, self._task, self._seed = options, task, seed

    async def act(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        """What the expert does, its calls with ids."""
        message = self._act(self._options, self._task, messages, random.Random(self._seed))
        calls = tuple(
            ToolCall(f"call-{len(messages)}-{place}", call.name, call.arguments)
            for place, call in enumerate(message.tool_calls)
        )
        return Message(Role.ASSISTANT, message.content, calls)
