"""A scripted player of BFCL's tasks: the ceiling."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Task
from agentrl_environments.bfcl.apis import named_arguments
from agentrl_environments.bfcl.tasks import BfclOptions, scenario_of


def act_gold(options: BfclOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """The reference calls of the turn in one message, and a word behind their results."""
    scenario = scenario_of(options, task)
    turn = sum(message.role is Role.USER for message in messages) - 1
    gold = scenario.gold[turn]
    if messages[-1].role is Role.TOOL:
        return Message(Role.ASSISTANT, "Done.")
    if not gold:
        return Message(Role.ASSISTANT, "I cannot do that with what I have.")
    arguments = [named_arguments(scenario, call, any_version=options.any_version) for call in gold]
    calls = tuple(ToolCall("", call.name, values) for call, values in zip(gold, arguments, strict=True))
    return Message(Role.ASSISTANT, tool_calls=calls)
