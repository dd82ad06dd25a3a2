"""An environment that an OpenEnv server holds, played like any other.

Where the server has MCP tools, these are what a policy may call; else its action is one tool, whose arguments are the
action's fields. An episode's reward is the sum of its steps' rewards. A session ends with its connection, so an episode
whose worker died is lost, unless nothing had acted in it yet.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from agentrl.config.base import ConfigModel
from agentrl.envs.definition import EnvironmentDefinition
from agentrl.envs.openenv_socket import ActionRefusedError, OpenEnvSocket, Reply, ServerFullError
from agentrl.envs.rows import Generated, Rows, TaskSource
from agentrl.process.threads import OwnThread, run_in_thread
from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.errors import Boundary, ConfigError, EpisodeError
from agentrl.types.message import Message, Role, ToolCall, ToolSpec
from agentrl.types.task import Split, Task

_MCP_ACTIONS = {"Action", "CallToolAction", "ListToolsAction"}
_ACTION_TOOL = "act"
_PAUSE_S = 0.5
_INFRASTRUCTURE = {"transport_error", "timeout"}


class OpenEnvOptions(ConfigModel):
    """Which server, and how its environment is posed."""

    url: str
    """Base URL, such as ``http://127.0.0.1:8000``."""
    token_variable: str | None = None
    """Environment variable that has the server's bearer token."""
    instructions: str = ""
    """What the policy is told before the first observation."""
    tasks: Path | None = None
    """File with a JSON object a line, the arguments of one reset each. Without it a task is a ``seed``."""
    connect_s: Annotated[float, Field(gt=0)] = 10.0
    """For a connection to be made."""
    call_s: Annotated[float, Field(gt=0)] = 60.0
    """For a reset or a step to be answered; the session is given up behind it."""
    full_s: Annotated[float, Field(ge=0)] = 20.0
    """How long a place on a full server is waited for; keep it below ``limits.tool_s``."""


class OpenEnvEnvironment:
    """A session of the server for one episode."""

    def __init__(self, options: OpenEnvOptions, task: Task) -> None:
        self._options, self._arguments = options, task.payload
        self._socket = OpenEnvSocket(options.url, _token(options), options.connect_s, options.call_s)
        # Its calls are carried out in their order, so one that was cancelled takes its own answer off the socket.
        self._thread = OwnThread("openenv")
        self._tools: dict[str, ToolSpec] = {}
        self._has_mcp_tools = False
        self._rewards: list[float | None] = []
        self._num_waits = 0

    async def start(self) -> Opening:
        """The observation of a reset, and the tools. Raises EpisodeError."""
        schema = (await self._thread.call(self._socket.schema)).action
        self._has_mcp_tools = schema.get("title") in _MCP_ACTIONS
        if self._has_mcp_tools:
            listed = await self._connect("step", {"type": "list_tools"})
            first = await self._call("reset", self._arguments)
            tools = _mcp_tools(listed, self._options.url)
        else:
            first = await self._connect("reset", self._arguments)
            tools = [_action_tool(schema)]
        self._tools = {spec.name: spec for spec in tools}
        instructions = [Message(Role.SYSTEM, self._options.instructions)] if self._options.instructions else []
        return Opening((*instructions, Message(Role.USER, _text(first.observation))), tuple(tools))

    async def step(self, action: Message) -> StepResult:
        """Every call's observation, in order; a message that calls nothing ends the episode."""
        messages: list[Message] = []
        is_done = not action.tool_calls
        for call in action.tool_calls:
            text, is_done = ("error: the episode is over", True) if is_done else await self._act(call)
            messages.append(Message(Role.TOOL, text, tool_call_id=call.id))
        return StepResult(tuple(messages), is_done)

    async def score(self) -> Score:
        """The sum of all rewards; None if there were steps, and none of them had one."""
        metrics = {"openenv_steps": float(len(self._rewards)), "openenv_waits": float(self._num_waits)}
        known = [reward for reward in self._rewards if reward is not None]
        return Score(None if self._rewards and not known else math.fsum(known), metrics)

    async def close(self) -> None:
        """End the session."""
        self._thread.end()
        await run_in_thread("openenv-close", self._socket.close)

    async def _connect(self, kind: str, data: dict[str, Any]) -> Reply:
        """The answer to a session's first call; a full server is asked again.

        Waits for: a place. Unblocked by: one, or `full_s`.
        """
        until = time.monotonic() + self._options.full_s
        while True:
            await self._thread.call(self._socket.open)
            try:
                return await self._call(kind, data)
            except ServerFullError as full:
                if time.monotonic() + _PAUSE_S > until:
                    message = f"{self._options.url} is full: {full}; raise its limit or play fewer episodes at once"
                    raise EpisodeError(Boundary.ENVIRONMENT, "capacity", message) from full
                self._num_waits += 1
                await asyncio.sleep(_PAUSE_S)

    async def _call(self, kind: str, data: dict[str, Any]) -> Reply:
        return await self._thread.call(lambda: self._socket.call(kind, data))

    async def _act(self, call: ToolCall) -> tuple[str, bool]:
        """What a policy reads of a call, and whether the episode is over."""
        if call.error is not None:
            return f"error: the tool call is malformed ({call.error})", False
        if call.name not in self._tools:
            return f"error: no tool '{call.name}'; there is {', '.join(self._tools)}", False
        arguments = call.arguments
        if self._has_mcp_tools:
            arguments = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
        try:
            reply = await self._call("step", arguments)
        except ActionRefusedError as refusal:
            return f"error: {refusal}", False
        self._rewards.append(None if reply.reward is None else float(reply.reward))
        text = _tool_text(reply.observation) if self._has_mcp_tools else _text(reply.observation)
        return text, reply.done


def _token(options: OpenEnvOptions) -> str | None:
    if options.token_variable is None:
        return None
    token = os.environ.get(options.token_variable)
    if not token:
        raise ConfigError(
            f"environment variable {options.token_variable} is not set; give it the token of {options.url}"
        )
    return token


def _action_tool(schema: dict[str, Any]) -> ToolSpec:
    """The action as a tool; its metadata is for programs."""
    fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    parameters = {key: value for key, value in schema.items() if key not in ("title", "description", "properties")}
    description = schema.get("description", f"Take an action: {schema.get('title', 'Action')}.")
    return ToolSpec(_ACTION_TOOL, description, {"type": "object", **parameters, "properties": fields})


def _mcp_tools(listed: Reply, url: str) -> list[ToolSpec]:
    tools = listed.observation.get("tools", [])
    if not tools:
        why = listed.observation.get("metadata", {}).get("error", "its list is empty")
        raise EpisodeError(Boundary.ENVIRONMENT, "create", f"{url} has no tools to call: {why}")
    return [ToolSpec(each["name"], each.get("description") or "", each["input_schema"]) for each in tools]


def _text(observation: dict[str, Any]) -> str:
    """An observation as a policy reads it: its only text, else JSON."""
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    if len(fields) == 1 and isinstance(only := next(iter(fields.values())), str):
        return only
    return json.dumps(fields, ensure_ascii=False)


def _tool_text(observation: dict[str, Any]) -> str:
    """What an MCP tool returned. Raises EpisodeError if the call did not reach it."""
    error, result = observation.get("error"), observation.get("result")
    if error is not None:
        message = f"{observation.get('tool_name')}: {error.get('message')}"
        if error.get("error_type") in _INFRASTRUCTURE:
            raise EpisodeError(Boundary.ENVIRONMENT, error["error_type"], message)
        return f"error: {message}"
    if not isinstance(result, dict) or "content" not in result:
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    texts = [part["text"] for part in result["content"] if part.get("type") == "text"]
    shown = "\n".join(texts) if texts else json.dumps(result.get("data"), ensure_ascii=False)
    return f"error: {shown}" if result.get("is_error") else shown


def _source(options: OpenEnvOptions) -> TaskSource:
    return (
        Generated(lambda chance: {"seed": chance.randrange(2**31)}) if options.tasks is None else _rows(options.tasks)
    )


@cache
def _rows(file: Path) -> Rows:
    return Rows(file)


def _sample_task(options: OpenEnvOptions, split: Split, ordinal: int, seed: int) -> Task:
    return _source(options).task("openenv", split, ordinal, seed)


def _num_tasks(options: OpenEnvOptions) -> int | None:
    return _source(options).num_tasks


definition = EnvironmentDefinition(
    name="openenv",
    description="The environment of an OpenEnv server, by its URL.",
    sample_task=_sample_task,
    create=OpenEnvEnvironment,
    options=OpenEnvOptions,
    num_tasks=_num_tasks,
    placement="inline",  # its calls wait for the server in threads
)
