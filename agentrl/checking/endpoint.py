"""A model behind any endpoint of OpenAI's Chat Completions as a player."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.inference.transport import HttpConnections, NoAnswerError
from agentrl.types.errors import AgentRLError
from agentrl.types.message import Message, Role, ToolCall, ToolSpec

_CONNECT_S = 10.0
_ANSWER_S = 120.0
_SHOWN = 300  # characters of an endpoint's error


class EndpointPlayer:
    """A model behind an endpoint of OpenAI's Chat Completions; close it at the end."""

    def __init__(self, url: str, model: str, token: str | None = None) -> None:
        base = url.rstrip("/").removesuffix("/chat/completions")
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
        self._url, self._model = base, model
        self._http = HttpConnections(base, headers, _CONNECT_S)

    async def act(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        """The model's reply.

        Waits for: the endpoint. Unblocked by: its answer, a deadline of two minutes.

        Raises:
            AgentRLError: the endpoint does not answer, refuses, or answers something else.
        """
        body: dict[str, Any] = {"model": self._model, "messages": [_spoken(message) for message in messages]}
        if tools:
            body["tools"] = [{"type": "function", "function": _told(spec)} for spec in tools]
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await self._http.request("POST", "/chat/completions", json.dumps(body).encode())
        except (NoAnswerError, TimeoutError) as error:
            raise AgentRLError(
                f"the policy at {self._url} gave no answer ({str(error) or 'too late'}); is the address right, its /v1 "
                "included?"
            ) from error
        if answer.status != 200:
            raise AgentRLError(f"the policy at {self._url} answered {answer.status}: {answer.text[:_SHOWN]}")
        try:
            return _heard(json.loads(answer.body)["choices"][0]["message"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise AgentRLError(
                f"the policy at {self._url} does not speak Chat Completions ({error!r}): {answer.text[:_SHOWN]}"
            ) from error

    async def close(self) -> None:
        """Close its connections."""
        await self._http.close()


def _spoken(message: Message) -> dict[str, Any]:
    spoken: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.tool_calls:
        spoken["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
            for c in message.tool_calls
        ]
    if message.tool_call_id is not None:
        spoken["tool_call_id"] = message.tool_call_id
    return spoken


def _told(spec: ToolSpec) -> dict[str, Any]:
    return {"name": spec.name, "description": spec.description, "parameters": spec.parameters}


def _heard(message: Mapping[str, Any]) -> Message:
    calls = tuple(_called(call) for call in message.get("tool_calls") or ())
    return Message(Role.ASSISTANT, message.get("content") or "", calls)


def _called(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return ToolCall(call["id"], function["name"], error="invalid_json", raw=function["arguments"])
    if not isinstance(arguments, dict):
        return ToolCall(call["id"], function["name"], error="invalid_json", raw=function["arguments"])
    return ToolCall(call["id"], function["name"], arguments)
