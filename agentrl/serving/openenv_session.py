"""OpenEnv's idea of a session, over those of the table: it is reset to one task after the other.

An action calls a tool, or says something; whatever tools an environment has, ``reply`` is one more, which says
something, for clients that know tools only. The step that ends an episode has the whole episode's reward.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec

from agentrl.envs import wire
from agentrl.envs.epochs import place_in_list
from agentrl.serving.table import SessionTable
from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.message import Message, Role, ToolCall, ToolSpec
from agentrl.types.task import Split, Task

Action = TypeVar("Action")
Data = dict[str, Any]
_CALL_ID = "call-0"
_DRAWN = 2**31
_SEED = 0
SPLITS = {"train": Split.TRAIN, "heldout": Split.HELDOUT, "test": Split.HELDOUT}
"""Names of splits; OpenEnv knows held-out tasks as ``test``."""
REPLY = ToolSpec(
    "reply",
    "Say something without calling another tool.",
    {"type": "object", "properties": {"content": {"type": "string"}}, "required": ["content"]},
)

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Reset(msgspec.Struct, frozen=True):
    """Which task: the `index`-th of a split, else the one that `seed` stands for, else any; more arguments are none."""

    seed: _Count | None = None
    episode_id: Annotated[str, msgspec.Meta(max_length=255)] | None = None
    split: str = "train"
    index: _Count | None = None


class ListTools(msgspec.Struct, frozen=True, tag_field="type", tag="list_tools"):
    """Which tools there are."""


class CallTool(msgspec.Struct, frozen=True, tag_field="type", tag="call_tool", forbid_unknown_fields=True):
    """Call one of them."""

    tool_name: str
    arguments: dict[str, Any] = {}
    metadata: dict[str, Any] = {}


class Say(msgspec.Struct, frozen=True, tag_field="type", tag="message", forbid_unknown_fields=True):
    """Say something without a call."""

    content: str
    metadata: dict[str, Any] = {}


ACTION_SCHEMA = {
    # Clients know an environment with tools by this title.
    "title": "CallToolAction",
    "description": "Call a tool, list the tools, or say something.",
    "type": "object",
    "properties": {
        "metadata": {"type": "object", "additionalProperties": True},
        "type": {"enum": ["call_tool", "list_tools", "message"], "default": "call_tool", "type": "string"},
        "tool_name": {"type": "string", "description": "Of call_tool."},
        "arguments": {"type": "object", "additionalProperties": True, "description": "Of call_tool."},
        "content": {"type": "string", "description": "Of message."},
    },
    "required": ["tool_name"],
    "additionalProperties": False,
}

_read_action: msgspec.json.Decoder[ListTools | CallTool | Say] = msgspec.json.Decoder(ListTools | CallTool | Say)
_read_call = msgspec.json.Decoder(CallTool)
_read_reset = msgspec.json.Decoder(Reset)


INVALID = "action"
"""Kind of the failure of a call that does not fit the schema; nothing was done."""


def invalid(message: str) -> EpisodeError:
    """What a client sent does not fit the schema."""
    return EpisodeError(Boundary.CONTRACT, INVALID, message)


@dataclass(slots=True)
class _Episode:
    """What is known of the task being played."""

    handle: str
    opening: Opening
    episode_id: str
    num_steps: int = 0
    is_over: bool = False
    call_prefix: str = field(default_factory=lambda: secrets.token_hex(8))

    def next_id(self) -> str:
        """An id for a call of its session."""
        self.num_steps += 1
        return f"{self.call_prefix}-{self.num_steps}"


class OpenEnvSession:
    """Plays tasks of one environment, one call at a time."""

    def __init__(self, table: SessionTable, environment: str) -> None:
        self._table, self.environment = table, environment
        self._lock = asyncio.Lock()
        self._episode: _Episode | None = None
        self._was_reset = False

    @property
    def lives(self) -> bool:
        """Whether it is at work, or the table still has its session."""
        return self._lock.locked() or (self._episode is not None and self._table.has(self._episode.handle))

    async def begin(self) -> None:
        """Open a session of any task, so that there is a place and a list of tools. Raises EpisodeError."""
        async with self._lock:
            await self._open(Reset())

    async def act(self, operation: str, data: bytes | msgspec.Raw = b"{}") -> Data:
        """Carry out a ``reset`` or a ``step``, tell the ``state`` or the ``tools``, or ``call`` one of them.

        Raises:
            EpisodeError: kind ``action``: `data` are none; else the environment failed, or there is no room.
        """
        async with self._lock:
            match operation:
                case "step":
                    return await self._step(_decoded_action(data))
                case "reset":
                    return await self._reset(_decoded(_read_reset, data))
                case "call":
                    if self._episode is None:
                        await self._open(Reset())
                    return await self._act(_decoded(_read_call, data))
                case "tools":
                    return await self._tools()
                case "state":
                    return self._state()
        raise invalid(f"there is no operation {operation}")

    async def close(self) -> None:
        """End the session of now; safe to call twice."""
        async with self._lock:
            await self._end()

    async def _reset(self, arguments: Reset) -> Data:
        opening = await self._open(arguments)
        self._was_reset = True
        metadata = {} if opening.agent is None else {"agent": opening.agent}
        return _observed({"messages": _plain(opening.messages), "metadata": metadata})

    async def _step(self, action: ListTools | CallTool | Say) -> Data:
        if isinstance(action, ListTools):
            return _observed({**await self._tools(), "metadata": {}})
        if not self._was_reset:
            raise EpisodeError(Boundary.ENVIRONMENT, "protocol", "no task has begun; reset the environment first")
        return await self._act(action)

    async def _tools(self) -> Data:
        """The tools of the task of now, or of any; to list them is no step."""
        opening = await self._open(Reset()) if self._episode is None else self._episode.opening
        specs = [*opening.tools, *([] if REPLY.name in {spec.name for spec in opening.tools} else [REPLY])]
        return {"tools": [{"name": s.name, "description": s.description, "input_schema": s.parameters} for s in specs]}

    def _state(self) -> Data:
        if self._episode is None:
            return {"episode_id": None, "step_count": 0}
        return {"episode_id": self._episode.episode_id, "step_count": self._episode.num_steps}

    async def _open(self, reset: Reset) -> Opening:
        await self._end()
        task = await self._task(reset)
        opening_id = secrets.token_hex(16)
        opened = await self._table.answer(wire.Open(id=opening_id, environment=self.environment, task=task))
        assert isinstance(opened, wire.Opened)
        try:
            opening = await self._table.answer(wire.Start(id=f"{opening_id}-start", session=opened.session))
        except EpisodeError:
            await self._table.answer(wire.Close(id=f"{opening_id}-close", session=opened.session))
            raise
        assert isinstance(opening, Opening)
        self._episode = _Episode(opened.session, opening, reset.episode_id or opening_id)
        return opening

    async def _task(self, reset: Reset) -> Task:
        if reset.split not in SPLITS:
            raise invalid(f"split: there is no '{reset.split}'; there are {', '.join(SPLITS)}")
        split = SPLITS[reset.split]
        size = self._table.host(self.environment).description.num_tasks if split is Split.TRAIN else None
        ordinal = secrets.randbelow(_DRAWN) if reset.seed is None else reset.seed
        if reset.index is not None:
            ordinal = reset.index if size is None else _ordinal(reset.index, size)
        elif size is not None:
            ordinal %= size
        sample = wire.Sample(id="", environment=self.environment, split=split, seed=_SEED, ordinals=(ordinal,))
        tasks = await self._table.answer(sample)
        assert isinstance(tasks, list)
        task: Task = tasks[0]
        return task

    async def _act(self, action: CallTool | Say) -> Data:
        episode = self._episode
        if episode is None or episode.is_over:
            raise EpisodeError(Boundary.ENVIRONMENT, "protocol", "the episode is over; reset the environment")
        message = _message(action, episode.opening.tools)
        step = wire.Step(id=episode.next_id(), session=episode.handle, action=message)
        result = await self._table.answer(step)
        assert isinstance(result, StepResult)
        score = await self._judge(episode) if result.is_done else Score(None)
        metadata: Data = dict(score.metrics) if result.agent is None else {**score.metrics, "agent": result.agent}
        if isinstance(action, Say):
            observation: Data = {"messages": _plain(result.messages), "metadata": metadata}
        else:
            text = "\n".join([message.content for message in result.messages])
            observation = {"tool_name": action.tool_name, "result": text, "error": None, "metadata": metadata}
        return _observed(observation, score.reward, result.is_done)

    async def _judge(self, episode: _Episode) -> Score:
        episode.is_over = True
        call = wire.GiveScore(id=f"{episode.call_prefix}-score", session=episode.handle)
        score = await self._table.answer(call)
        assert isinstance(score, Score)
        return score

    async def _end(self) -> None:
        episode, self._episode, self._was_reset = self._episode, None, False
        if episode is not None:
            await self._table.answer(wire.Close(id=f"{episode.call_prefix}-close", session=episode.handle))


def _ordinal(index: int, size: int) -> int:
    """When a run first comes to the task that is the `index`-th in a list. Raises EpisodeError."""
    if index >= size:
        raise invalid(f"index: there are {size} training tasks, and no task {index}")
    return _order(size)[index]


@cache
def _order(size: int) -> list[int]:
    """By place in a list of tasks, when a run comes to it."""
    ordinals = [0] * size
    for ordinal in range(size):
        ordinals[place_in_list(ordinal, size, _SEED)] = ordinal
    return ordinals


def _message(action: CallTool | Say, tools: tuple[ToolSpec, ...]) -> Message:
    if isinstance(action, Say):
        return Message(Role.ASSISTANT, action.content)
    if action.tool_name == REPLY.name and REPLY.name not in {spec.name for spec in tools}:
        content = action.arguments.get("content")
        if not isinstance(content, str) or len(action.arguments) != 1:
            raise invalid("arguments: reply takes a text, content")
        return Message(Role.ASSISTANT, content)
    return Message(Role.ASSISTANT, tool_calls=(ToolCall(_CALL_ID, action.tool_name, action.arguments),))


def _decoded(decoder: msgspec.json.Decoder[Action], data: bytes | msgspec.Raw) -> Action:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise invalid(str(error)) from error


def _decoded_action(data: bytes | msgspec.Raw) -> ListTools | CallTool | Say:
    """An action; one that does not say what it is calls a tool, as in OpenEnv."""
    try:
        return _read_action.decode(data)
    except msgspec.ValidationError as error:
        if "required field `type`" not in str(error):
            raise invalid(str(error)) from error
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise invalid(str(error)) from error
    return _decoded(_read_call, data)


def _plain(messages: tuple[Message, ...]) -> list[Data]:
    return [{"role": str(message.role), "content": message.content} for message in messages]


def _observed(observation: Data, reward: float | None = None, done: bool = False) -> Data:
    """The data of an observation frame; metadata are on top, too, where there are any."""
    data = {"observation": observation, "reward": reward, "done": done}
    if observation["metadata"]:
        data["metadata"] = observation["metadata"]
    return data
