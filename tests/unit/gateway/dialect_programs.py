"""Official clients that speak to a dialect, with nothing between them but bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import anthropic
import httpx2
import numpy as np
import openai

from agentrl.gateway.chat import ChatDialect
from agentrl.gateway.dialects import Dialect, ReadCall
from agentrl.gateway.messages import MessagesDialect
from agentrl.gateway.responses import ResponsesDialect
from agentrl.types.generation import FinishReason
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.program import CallRefusedError, ModelReply

QUESTION = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "query", "description": "Run SQL.", "parameters": {"type": "object", "properties": {"sql": {}}}}
REPLIES = {
    "text": Message(Role.ASSISTANT, "The answer is 93 …\u2028and that is \U0001f40d all."),
    "empty": Message(Role.ASSISTANT),
    "calls": Message(
        Role.ASSISTANT,
        tool_calls=(ToolCall("call-0", "query", {"sql": "SELECT 1", "n": [1, 2.5, None]}), ToolCall("call-1", "stop")),
    ),
    "all": Message(
        Role.ASSISTANT, "I look.", (ToolCall("call-0", "query", {"sql": "ä"}),), reasoning="It may be in the table."
    ),
    "unparsed": Message(
        Role.ASSISTANT,
        "",
        (
            ToolCall("call-0", "query", error="invalid_json", raw='{"sql": '),
            ToolCall("call-1", "", error="missing_name", raw='{"arguments": {}}'),
        ),
    ),
}


def reply_of(message: Message, finish: FinishReason = FinishReason.STOP) -> ModelReply:
    """A reply of three tokens to a prompt of ten, of which four were in a cache."""
    logprobs = np.asarray([-0.5, -np.inf, 0.0], np.float32)
    return ModelReply(message, finish, 10, np.asarray([5, 6, 1], np.int32), logprobs, ("9", "é", ""), 4)


@dataclass
class Served:
    """What stands behind a client: one dialect, which always gives the same reply."""

    dialect: Dialect
    reply: ModelReply
    read: list[ReadCall] = field(default_factory=list)

    def handle(self, request: httpx2.Request) -> httpx2.Response:
        """Answer as a gateway does, with keep-alives before a stream."""
        assert request.url.path == self.dialect.path
        try:
            self.read.append(self.dialect.read(request.content))
        except CallRefusedError as refusal:
            return httpx2.Response(refusal.status, json=self.dialect.error(refusal))
        if not self.read[-1].is_streamed:
            return httpx2.Response(200, json=self.dialect.answer(self.read[-1], self.reply, "7"))
        waiting = [self.dialect.keep_alive("7")] * 2
        stream = "".join([*waiting, *self.dialect.events(self.read[-1], self.reply, "7")])
        return httpx2.Response(200, text=stream, headers={"content-type": "text/event-stream"})

    def openai(self) -> openai.OpenAI:
        """A client of OpenAI's dialects."""
        http = httpx2.Client(transport=httpx2.MockTransport(self.handle))
        return openai.OpenAI(api_key="key", base_url="http://gateway/v1", http_client=http, max_retries=0)

    def async_openai(self) -> openai.AsyncOpenAI:
        """The same for coroutines."""
        http = httpx2.AsyncClient(transport=httpx2.MockTransport(self.handle))
        return openai.AsyncOpenAI(api_key="key", base_url="http://gateway/v1", http_client=http, max_retries=0)

    def anthropic(self) -> anthropic.Anthropic:
        """A client of Anthropic's dialect."""
        http = httpx2.Client(transport=httpx2.MockTransport(self.handle))
        return anthropic.Anthropic(api_key="key", base_url="http://gateway", http_client=http, max_retries=0)

    def async_anthropic(self) -> anthropic.AsyncAnthropic:
        """The same for coroutines."""
        http = httpx2.AsyncClient(transport=httpx2.MockTransport(self.handle))
        return anthropic.AsyncAnthropic(api_key="key", base_url="http://gateway", http_client=http, max_retries=0)


def chat(message: Message, finish: FinishReason = FinishReason.STOP) -> Served:
    """Chat Completions that reply with a message."""
    return Served(ChatDialect(), reply_of(message, finish))


def responses(message: Message, finish: FinishReason = FinishReason.STOP) -> Served:
    """Responses that reply with a message."""
    return Served(ResponsesDialect(), reply_of(message, finish))


def messages(message: Message, finish: FinishReason = FinishReason.STOP) -> Served:
    """Messages that reply with a message."""
    return Served(MessagesDialect(), reply_of(message, finish))


def read(dialect: Dialect, request: dict) -> ReadCall:
    """A request as the dialect reads it."""
    return dialect.read(json.dumps(request).encode())


def events_in(stream: list[str]) -> list[dict]:
    """The data of server-sent events; each must be one event of its own, named as its data says."""
    found = []
    for piece in stream:
        lines = piece.removesuffix("\n\n").split("\n")
        data = json.loads(lines[-1].removeprefix("data: "))
        assert lines[:-1] in ([], [f"event: {data.get('type')}"])
        assert piece.endswith("\n\n")
        found.append(data)
    return found
