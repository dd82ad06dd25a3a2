"""A chat loop as a harness of verifiers, in its own process: no sandbox, no installation, no program to start.

It is what the harness ``null`` of verifiers does by a script that is installed first: the policy may call the task's
tools, which verifiers serves by MCP, until it answers without a call.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness"]


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Answers tool calls by the task's tools; a reply without a call ends the segment."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """One segment of the exchange. A context that is full ends it, as does a limit of verifiers."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += map(message_to_wire, prompt or ())
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            api = await stack.enter_async_context(AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0))
            schemas, *tools = await connect_mcp({"mcpServers": servers}, stack)
            asking = {"model": ctx.model, "messages": messages, **({"tools": schemas} if schemas else {})}
            try:
                await _talk(api, asking, tools)
            except APIStatusError as error:
                return ProgramResult(exit_code=int(not is_context_overflow(error)), stdout="", stderr=str(error))
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _talk(api: Any, asking: dict[str, Any], tools: list[Any]) -> None:
    """Waits for: a reply without a call. Unblocked by: it, an error of the policy's, or verifiers' own deadlines."""
    while True:
        reply = (await api.chat.completions.create(**asking)).choices[0].message
        asking["messages"].append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            return
        for call in reply.tool_calls:
            content = await _result(call.function, tools)
            asking["messages"].append({"role": "tool", "tool_call_id": call.id, "content": content})


async def _result(function: Any, tools: list[Any]) -> Any:
    dispatch, servers = tools
    if function.name not in dispatch:
        return f"error: no tool '{function.name}'; there is {', '.join(dispatch) or 'none'}"
    try:
        arguments = json.loads(function.arguments or "{}")
    except json.JSONDecodeError as error:
        return f"error: the arguments are no JSON ({error})"
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object"
    return await call_mcp(servers, dispatch, function.name, arguments)
