"""The echo of `tests/adapters/openenv_side/serve.py` as an environment of agentrl: says words again, rewards lengths.

``stop`` ends the episode, and so does a message without a call; ``fail`` raises.
"""

from __future__ import annotations

from agentrl.config.base import ConfigModel
from agentrl.envs.definition import EnvironmentDefinition
from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.message import Message, Role, ToolSpec
from agentrl.types.task import Split, Task

WORD = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
TOOLS = (ToolSpec("echo", "Say a word again.", WORD),)


class EchoOptions(ConfigModel):
    """How many training tasks there are."""

    tasks: int = 1000


class EchoEnvironment:
    def __init__(self, options: EchoOptions, task: Task) -> None:
        self._task = task
        self._length = 0

    async def start(self) -> Opening:
        return Opening((Message(Role.USER, f"task {self._task.id}"),), TOOLS)

    async def step(self, action: Message) -> StepResult:
        words = [call.arguments["word"] for call in action.tool_calls]
        if "fail" in words:
            raise RuntimeError("the echo is broken")
        self._length += sum(map(len, words)) if words else len(action.content)
        replies = [Message(Role.TOOL, call.arguments["word"], tool_call_id=call.id) for call in action.tool_calls]
        return StepResult(tuple(replies), is_done=not words or "stop" in words)

    async def score(self) -> Score:
        return Score(float(self._length))

    async def close(self) -> None: ...


def _sample_task(options: EchoOptions, split: Split, ordinal: int, seed: int) -> Task:
    return Task("echo", split, ordinal)


echo = EnvironmentDefinition(
    "echo",
    "Says words again.",
    _sample_task,
    EchoEnvironment,
    EchoOptions,
    placement="inline",
    num_tasks=lambda options: options.tasks,
)
