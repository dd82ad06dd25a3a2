"""An environment as one class: typed methods are its tools, a method poses the task, another one judges.

Example, whole::

    class Sums(ToolEnvironment):
        "Additions with a calculator."

        def prompt(self) -> str:
            return f"What is {self.row['a']} + {self.row['b']}?"

        @tool
        def add(self, a: int, b: int) -> int:
            "Add two numbers."
            return a + b

        def reward(self) -> float:
            return float(self.answer == str(self.row["a"] + self.row["b"]))


    def gold(row: Mapping[str, Any], messages: Sequence[Message]) -> Message:
        return call("add", **row) if len(messages) == 1 else say(messages[-1].content)


    definition = define("sums", Sums, Rows([{"a": 3, "b": 4}, {"a": 20, "b": 22}]), gold=gold)
"""

from __future__ import annotations

import inspect
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any, Generic

from typing_extensions import TypeVar

from agentrl.config.base import ConfigModel
from agentrl.envs.definition import EnvironmentDefinition, Expert, NoOptions
from agentrl.envs.rows import Generated, Rows, TaskSource
from agentrl.envs.tools import Toolbox, ToolError, external_tool, tool
from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Task

Options = TypeVar("Options", bound=ConfigModel, default=NoOptions)
Gold = Callable[[Mapping[str, Any], Sequence[Message]], Message]

__all__ = [
    "Generated",
    "Rows",
    "ToolEnvironment",
    "ToolError",
    "call",
    "define",
    "external_tool",
    "say",
    "tool",
    "toolbox_of",
]


@cache
def toolbox_of(environment: type) -> Toolbox:
    """The tools of a class. Raises ConfigError."""
    return Toolbox(environment)


class ToolEnvironment(ABC, Generic[Options]):
    """The base of an environment whose methods marked with `tool` are what a policy can do.

    A wrong tool, wrong arguments and a `ToolError` are observations; any other exception is a fault of the environment
    and fails the episode. An episode ends with the first message that calls no tool, unless `reply` answers it, or
    after a step in which `finish` was called.

    `row` is the task's, `options` are the recipe's, `answer` is the last message without a tool call, stripped.
    """

    def __init__(self, options: Options, task: Task) -> None:
        self.options = options
        self.task = task
        self.answer: str | None = None
        self._is_done = False
        self.call_id = ""
        """Id of the call that is being carried out; empty outside of tools."""
        self.prepare()

    @property
    def row(self) -> dict[str, Any]:
        """What the task is made of."""
        return self.task.payload

    def prepare(self) -> None:
        """Set up what an episode needs."""

    @abstractmethod
    def prompt(self) -> str | Sequence[Message]:
        """The first message of the user, or all messages that begin the episode."""

    @abstractmethod
    def reward(self) -> float | Score | Awaitable[float | Score]:
        """The verdict, asked for once, at the end."""

    def reply(self, text: str) -> str | None:
        """What the user says to a message without tool calls; None ends the episode."""
        return None

    def free(self) -> None:
        """Let go of what `prepare` took."""

    def save(self) -> Any:
        """The state as JSON, if the environment can be restored from it; then `load` is needed, too."""
        raise NotImplementedError

    def load(self, state: Any) -> None:
        """Take a state that `save` gave, after `prepare`."""
        raise NotImplementedError

    def finish(self) -> None:
        """End the episode after this step."""
        self._is_done = True

    async def start(self) -> Opening:
        """Pose the task."""
        asked = self.prompt()
        messages = (Message(Role.USER, asked),) if isinstance(asked, str) else tuple(asked)
        return Opening(messages, toolbox_of(type(self)).specs)

    async def step(self, action: Message) -> StepResult:
        """Carry out the calls one after the other; a message without any is answered, or ends the episode."""
        if not action.tool_calls:
            self.answer = action.content.strip()
            said = self.reply(action.content)
            messages = () if said is None else (Message(Role.USER, said),)
            return StepResult(messages, is_done=said is None or self._is_done)
        toolbox = toolbox_of(type(self))
        replies = []
        for called in action.tool_calls:
            self.call_id = called.id
            replies.append(Message(Role.TOOL, await toolbox.call(self, called), tool_call_id=called.id))
        self.call_id = ""
        return StepResult(tuple(replies), is_done=self._is_done)

    async def score(self) -> Score:
        """The author's verdict as a score."""
        verdict = self.reward()
        found = await verdict if inspect.isawaitable(verdict) else verdict
        return found if isinstance(found, Score) else Score(found)

    async def snapshot(self) -> bytes:
        """The state, for environments with `save` and `load`."""
        return self.packed(self.save())

    def packed(self, state: Any) -> bytes:
        """What `restore` takes: a state, and where the conversation is."""
        return json.dumps({"answer": self.answer, "is_done": self._is_done, "state": state}).encode()

    async def close(self) -> None:
        """Free what is held."""
        self.free()

    def restore(self, snapshot: bytes) -> None:
        """Be where another instance was."""
        kept = json.loads(snapshot)
        self.answer, self._is_done = kept["answer"], kept["is_done"]
        self.load(kept["state"])


def define(
    name: str,
    environment: type[ToolEnvironment[Options]],
    tasks: TaskSource,
    *,
    options: type[Options] = NoOptions,  # type: ignore[assignment]
    gold: Gold | None = None,
    experts: Mapping[str, Expert[Options]] | None = None,
    is_deterministic: bool = False,
    is_quick: bool = False,
) -> EnvironmentDefinition[Options]:
    """The definition to be registered; its description is the first line of the class's docstring.

    `gold` plays a task rightly, given its row and the conversation so far. `is_deterministic` says that the same
    actions in a fresh instance give the same results, `is_quick` that every call is bounded and takes milliseconds, so
    that instances need no process of their own. An environment with `save` and `load` is restored from snapshots.

    Raises:
        ConfigError: the class has no docstring, or a tool's hints cannot become a schema.
    """
    description = (inspect.getdoc(environment) or "").partition("\n")[0]
    if not description or environment.__doc__ is None:
        raise ConfigError(f"environment '{name}': {environment.__name__} has no docstring; say in a line what it is")

    def restored(options: Options, task: Task, snapshot: bytes) -> ToolEnvironment[Options]:
        instance = environment(options, task)
        instance.restore(snapshot)
        return instance

    known = dict(experts or {})
    if gold is not None:
        known["gold"] = Expert("plays every task rightly", _as_act(gold))
    return EnvironmentDefinition(
        name=name,
        description=description,
        sample_task=lambda _, split, ordinal, seed: tasks.task(name, split, ordinal, seed),
        create=environment,
        options=options,
        experts=known,
        is_deterministic=is_deterministic,
        external_tools=toolbox_of(environment).external,
        restore=restored if environment.save is not ToolEnvironment.save else None,
        num_tasks=None if tasks.num_tasks is None else lambda _: tasks.num_tasks or 0,
        placement="inline" if is_quick else "process",
    )


def call(name: str, /, **arguments: Any) -> Message:
    """The message of a player that calls one tool."""
    return Message(Role.ASSISTANT, tool_calls=(ToolCall("", name, arguments),))


def say(text: str) -> Message:
    """The message of a player that calls no tool."""
    return Message(Role.ASSISTANT, text)


def _as_act(gold: Gold) -> Callable[[Any, Task, Sequence[Message], random.Random], Message]:
    return lambda options, task, messages, chance: gold(task.payload, messages)
