"""Poses a task, has a session's tools called, and judges the answer."""

from __future__ import annotations

import inspect

from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Task
from agentrl_environments.mcp.options import McpOptions, judge_of
from agentrl_environments.mcp.session import McpSession


class McpEnvironment:
    """One task over a session of its own. The first message that calls nothing is the answer, and ends the episode.

    An unknown tool, arguments that the server refuses and errors of tools are observations. A server that ends, does
    not answer in time or breaks the protocol fails the episode, which then counts for nobody.

    Example: of the row ``{"prompt": "How much is 20 + 22?", "answer": "42"}`` the call ``add {"a": 20, "b": 22}`` gives
    ``42``, and the message ``42`` scores 1.0.
    """

    def __init__(self, options: McpOptions, task: Task) -> None:
        self._options, self._row = options, task.payload
        self._judge = judge_of(options.judge)
        self._session = McpSession(options)
        self._tools: list[str] = []
        self._messages: list[Message] = []
        self._answer: str | None = None
        self._num_calls = self._num_errors = 0

    async def start(self) -> Opening:
        """The prompt, and the server's tools. Raises EpisodeError."""
        tools = await self._session.open()
        self._tools = [spec.name for spec in tools]
        if self._options.instructions:
            self._messages.append(Message(Role.SYSTEM, self._options.instructions))
        self._messages.append(Message(Role.USER, str(self._row["prompt"])))
        return Opening(tuple(self._messages), tools)

    async def step(self, action: Message) -> StepResult:
        """Every call's result, in order; a message that calls nothing ends the episode. Raises EpisodeError."""
        self._messages.append(action)
        if not action.tool_calls:
            self._answer = action.content
            return StepResult(is_done=True)
        replies = [Message(Role.TOOL, await self._act(call), tool_call_id=call.id) for call in action.tool_calls]
        self._messages += replies
        return StepResult(tuple(replies))

    async def score(self) -> Score:
        """The judge's verdict."""
        verdict = self._judge(self._row, self._answer, tuple(self._messages))
        found = await verdict if inspect.isawaitable(verdict) else verdict
        metrics = {"tool_calls": float(self._num_calls), "tool_errors": float(self._num_errors)}
        return found if isinstance(found, Score) else Score(found, metrics)

    async def close(self) -> None:
        """End the session."""
        await self._session.close()

    async def _act(self, call: ToolCall) -> str:
        self._num_calls += 1
        if call.error is not None:
            text = f"error: the tool call is malformed ({call.error})"
        elif call.name not in self._tools:
            text = f"error: no tool '{call.name}'; there is {', '.join(self._tools)}"
        else:
            text = await self._session.call(call.name, call.arguments)
        self._num_errors += text.startswith("error: ")
        return text
