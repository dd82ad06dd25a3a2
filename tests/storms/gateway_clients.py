"""Conversations in the official SDKs' words: what a program sends, and what it hears, in each dialect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import anthropic
import openai

from agentrl.types.program import GatewayAccess

SCHEMA = {"type": "object", "properties": {"sql": {"type": "string"}}}
TOOLS = (("query", "Query.", SCHEMA), ("spawn", "Start sub-agents.", {"type": "object"}))
RETRIES = 12
_PATIENCE_S = 0.15
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Heard:
    """A reply as a program got it: what it appends to its conversation, the text, and its calls (id, name, arguments).

    Of a call in token ids there is `token_ids` alone.
    """

    natives: tuple[Any, ...]
    text: str
    calls: tuple[tuple[str, str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A part of a conversation: ``system``, ``user``, ``result`` (of `call_id`), ``said`` (an assistant's message that
    the program made up), or ``reply``: what the policy said, as the answer to the call of this `number`.
    """

    kind: str
    text: str = ""
    call_id: str = ""
    heard: Heard | None = field(default=None, compare=False)
    number: int = -1


class HungUpError(Exception):
    """The program has closed its stream."""


class Speaker(Protocol):
    """One dialect: asks with a conversation. `breaks_off` is behind how many events it hangs up."""

    name: str

    async def ask(
        self, entries: Sequence[Entry], asker: dict[str, str], streams: bool, breaks_off: int | None, most: int | None
    ) -> Heard: ...


class ChatSpeaker:
    name = "chat"
    asker = "idempotency-key"

    def __init__(self, api: openai.AsyncOpenAI) -> None:
        self._api = api

    async def ask(
        self, entries: Sequence[Entry], asker: dict[str, str], streams: bool, breaks_off: int | None, most: int | None
    ) -> Heard:
        tools = [{"type": "function", "function": _named(tool, "parameters")} for tool in TOOLS]
        bound = {"max_tokens": most} if most else {}
        asked = {"model": "main", "messages": self._messages(entries), "tools": tools, "extra_headers": asker, **bound}
        if streams:
            message = (await self._streamed(asked, breaks_off)).choices[0].message
        else:
            message = (await self._api.chat.completions.create(**asked)).choices[0].message
        calls = tuple((c.id, c.function.name, _loads(c.function.arguments)) for c in message.tool_calls or ())
        return Heard((_plain(message),), message.content or "", calls)

    async def _streamed(self, asked: dict[str, Any], breaks_off: int | None) -> Any:
        async with self._api.chat.completions.stream(**asked) as stream:
            try:
                await _listen(stream, breaks_off)
                return await stream.get_final_completion()
            except openai.LengthFinishReasonError as error:  # how the SDK tells that a reply was cut short
                return error.completion

    def _messages(self, entries: Sequence[Entry]) -> list[Any]:
        messages: list[Any] = []
        for entry in entries:
            if entry.heard is not None:
                messages += entry.heard.natives
            elif entry.kind == "result":
                messages.append({"role": "tool", "tool_call_id": entry.call_id, "content": entry.text})
            else:
                messages.append({"role": _role(entry), "content": entry.text})
        return messages


class ResponsesSpeaker:
    name = "responses"
    asker = "thread-id"

    def __init__(self, api: openai.AsyncOpenAI) -> None:
        self._api = api

    async def ask(
        self, entries: Sequence[Entry], asker: dict[str, str], streams: bool, breaks_off: int | None, most: int | None
    ) -> Heard:
        tools = [{"type": "function", "strict": False} | _named(tool, "parameters") for tool in TOOLS]
        bound = {"max_output_tokens": most} if most else {}
        asked = {"model": "main", "input": self._items(entries), "tools": tools, "extra_headers": asker, **bound}
        if streams:
            async with self._api.responses.stream(**asked) as stream:
                # The SDK's own final response is one that was not cut short.
                response = (await _listen(stream, breaks_off)).response
        else:
            response = await self._api.responses.create(**asked)
        items = [item for item in response.output if item.type != "reasoning"]
        calls = tuple((i.call_id, i.name, _loads(i.arguments)) for i in items if i.type == "function_call")
        return Heard(tuple(map(_plain, response.output)), response.output_text, calls)

    def _items(self, entries: Sequence[Entry]) -> list[Any]:
        items: list[Any] = []
        for entry in entries:
            if entry.heard is not None:
                items += entry.heard.natives
            elif entry.kind == "result":
                items.append({"type": "function_call_output", "call_id": entry.call_id, "output": entry.text})
            else:
                items.append({"role": _role(entry), "content": entry.text})
        return items


class MessagesSpeaker:
    name = "messages"
    asker = "x-claude-code-agent-id"

    def __init__(self, api: anthropic.AsyncAnthropic) -> None:
        self._api = api

    async def ask(
        self, entries: Sequence[Entry], asker: dict[str, str], streams: bool, breaks_off: int | None, most: int | None
    ) -> Heard:
        tools = [_named(tool, "input_schema") for tool in TOOLS]
        system = [{"type": "text", "text": entry.text} for entry in entries if entry.kind == "system"]
        asked = {
            "model": "main", "max_tokens": most or 4096, "messages": self._messages(entries), "tools": tools,
            # Claude Code says so of every call, sent again or not.
            "extra_headers": {"x-stainless-retry-count": "0"} | asker, **({"system": system} if system else {}),
        }  # fmt: skip
        if streams:
            async with self._api.messages.stream(**asked) as stream:
                await _listen(stream, breaks_off)
                message = await stream.get_final_message()
        else:
            message = await self._api.messages.create(**asked)
        text = "".join(block.text for block in message.content if block.type == "text")
        calls = tuple((b.id, b.name, b.input) for b in message.content if b.type == "tool_use")
        return Heard(({"role": "assistant", "content": [_plain(b) for b in message.content]},), text, calls)

    def _messages(self, entries: Sequence[Entry]) -> list[Any]:
        """Results of one turn go in one message, as its blocks."""
        messages: list[Any] = []
        for before, entry in zip((None, *entries), entries, strict=False):
            if entry.heard is not None:
                messages += entry.heard.natives
            elif entry.kind == "result":
                block = {"type": "tool_result", "tool_use_id": entry.call_id, "content": entry.text}
                if before is not None and before.kind == "result":
                    messages[-1]["content"].append(block)
                else:
                    messages.append({"role": "user", "content": [block]})
            elif entry.kind != "system":
                messages.append({"role": _role(entry), "content": entry.text})
        return messages


@dataclass(frozen=True)
class Speakers:
    """One of each, over one connection pool for each SDK; `ids` posts to the route of token ids."""

    all: tuple[Any, ...]
    ids: openai.AsyncOpenAI


@asynccontextmanager
async def speaking(access: GatewayAccess, url: str) -> AsyncIterator[Speakers]:
    """Clients of a session, whose gateway is reached at a URL."""
    options: dict[str, Any] = {"api_key": access.key, "max_retries": RETRIES, "timeout": DEADLINE_S}
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(openai.AsyncOpenAI(base_url=f"{url}/v1", **options))
        ids = await stack.enter_async_context(openai.AsyncOpenAI(base_url=url, **options))
        claude = await stack.enter_async_context(anthropic.AsyncAnthropic(base_url=url, **options))
        yield Speakers((ChatSpeaker(api), ResponsesSpeaker(api), MessagesSpeaker(claude)), ids)


def is_cut_off(error: Exception) -> bool:
    """Whether this is what a connection that was cut looks like to a program.

    In the middle of a stream SDKs let through what their HTTP client raises, and that is not the same one for each.
    """
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return isinstance(error, openai.APIConnectionError | anthropic.APIConnectionError) or "TransportError" in kinds


async def ask_in_ids(api: openai.AsyncOpenAI, prompt_ids: Sequence[int], most: int) -> Heard:
    """One call in token ids."""
    sampling = {"max_tokens": most, "logprobs": 1}
    body = {"model": "main", "token_ids": list(prompt_ids), "sampling_params": sampling}
    answer: Any = await api.post("/inference/v1/generate", cast_to=object, body=body)
    return Heard((), "", (), tuple(answer["choices"][0]["token_ids"]))


async def _listen(stream: Any, breaks_off: int | None) -> Any:
    """Take a stream in, and return its last event.

    Raises HungUpError where it is broken off: behind so many events, or where the first is long in coming.
    """
    event: Any = None
    heard = 0
    events = aiter(stream)
    if breaks_off == 0:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                event = await anext(events)
        except TimeoutError:
            raise HungUpError from None
    async for further in events:
        event = further
        heard += 1
        if heard == breaks_off:
            raise HungUpError
    return event


def _named(tool: tuple[str, str, Any], schema: str) -> dict[str, Any]:
    return {"name": tool[0], "description": tool[1], schema: tool[2]}


def _role(entry: Entry) -> str:
    return {"said": "assistant"}.get(entry.kind, entry.kind)


def _plain(part: Any) -> Any:
    """A part of an answer as it goes back, without what the SDK has added for its caller."""
    return part.model_dump(exclude_none=True, exclude={"parsed", "parsed_arguments", "parsed_output"})


def _loads(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
