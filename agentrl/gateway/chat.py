"""OpenAI Chat Completions: ``POST /v1/chat/completions``.

A call that did not parse goes out with the policy's text as its arguments, so that the program can say what is wrong
with it; one without a name stands in the text. Reasoning goes out as ``reasoning_content``, and is not read back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openai.types.chat import (
    ChatCompletion,
    ChatCompletionAssistantMessageParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from pydantic import TypeAdapter

from agentrl.gateway import rendering, shapes
from agentrl.gateway.dialects import ReadCall
from agentrl.types.generation import FinishReason
from agentrl.types.message import Message, Role, ToolCall, ToolSpec
from agentrl.types.program import ModelCall, ModelReply

_SETTINGS: shapes.Shape = TypeAdapter(CompletionCreateParamsBase)
_TOOL: shapes.Shape = TypeAdapter(ChatCompletionFunctionToolParam)
_MESSAGES: dict[str, tuple[Role, shapes.Shape]] = {
    "developer": (Role.SYSTEM, TypeAdapter(ChatCompletionDeveloperMessageParam)),
    "system": (Role.SYSTEM, TypeAdapter(ChatCompletionSystemMessageParam)),
    "user": (Role.USER, TypeAdapter(ChatCompletionUserMessageParam)),
    "assistant": (Role.ASSISTANT, TypeAdapter(ChatCompletionAssistantMessageParam)),
    "tool": (Role.TOOL, TypeAdapter(ChatCompletionToolMessageParam)),
}
_TEXTS = {"text": "text", "refusal": "refusal"}
_READ = (
    "model",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "modalities",
    "stream_options",
)
_REFUSED = ("audio", "functions", "function_call")
_IN_VAIN: dict[str, tuple[object, ...]] = {
    "temperature": (),
    "top_p": (),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "seed": (),
    "stop": ([],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "reasoning_effort": (),
    "verbosity": (),
    "prediction": (),
    "web_search_options": (),
    "store": (False,),
    "moderation": (),
}
_SILENT = frozenset(
    "messages tools stream metadata user service_tier safety_identifier prompt_cache_key prompt_cache_options"
    " prompt_cache_retention".split()
)
_KNOWN = frozenset(_READ) | frozenset(_REFUSED) | _SILENT
_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_LEAST_LOGPROB = -9999.0  # JSON has no infinity


class ChatDialect(rendering.OpenAIStyle):
    """Reads and answers chat completions."""

    name = "chat"
    path = "/v1/chat/completions"
    over_status = 401

    def read(self, body: bytes) -> ReadCall:
        """The call that a request's body asks for. Raises CallRefusedError."""
        request = shapes.read_object(body)
        shapes.check_settings(_SETTINGS, request, _READ, messages=[])
        _refuse_what_no_policy_gives(request)
        tools, without_effect = _read_tools(request)
        messages = (_read_message(entry, place) for entry, place in shapes.objects(request.get("messages"), "messages"))
        call = ModelCall(
            model=request["model"],
            messages=shapes.conversation(messages, "messages"),
            tools=tools,
            max_tokens=shapes.token_bound(request, "max_tokens", "max_completion_tokens"),
            wants_pieces=bool(request.get("logprobs")),
        )
        return ReadCall(
            call,
            is_streamed=shapes.flag(request, "stream"),
            overrides=(*shapes.in_vain(request, _IN_VAIN, _KNOWN), *without_effect),
            wants_usage=bool((request.get("stream_options") or {}).get("include_usage")),
        )

    def answer(self, read: ReadCall, reply: ModelReply, call_id: str) -> dict[str, Any]:
        """The whole completion."""
        text, calls = rendering.visible(reply.message, rendering.has_name)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if reply.message.reasoning is not None:
            message["reasoning_content"] = reply.message.reasoning
        if calls:
            message["tool_calls"] = [_call_object(call) for call in calls]
        finish = "tool_calls" if calls and reply.finish is FinishReason.STOP else _FINISH[reply.finish]
        logprobs = {"content": _logprobs(reply), "refusal": None} if read.call.wants_pieces else None
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": logprobs}
        completion = ChatCompletion.model_validate(
            _head(read, call_id, "chat.completion") | {"choices": [choice], "usage": _usage(reply)}
        )
        return completion.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def events(self, read: ReadCall, reply: ModelReply, call_id: str) -> Iterator[str]:
        """The completion as chunks, its log-probabilities with the last."""
        whole = self.answer(read, reply, call_id)
        head = _head(read, call_id, "chat.completion.chunk")
        choice = whole["choices"][0]
        for delta in _deltas(choice["message"]):
            entry = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
            yield rendering.server_event(head | {"choices": [entry]})
        last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": choice["logprobs"]}
        yield rendering.server_event(head | {"choices": [last]})
        if read.wants_usage:
            yield rendering.server_event(head | {"choices": [], "usage": whole["usage"]})
        yield "data: [DONE]\n\n"

    def echo(self, message: Message) -> Message:
        """The assistant message as it comes back."""
        return rendering.echo_with_text_arguments(message)


def _refuse_what_no_policy_gives(request: dict[str, Any]) -> None:
    if request.get("n") not in (None, 1):
        raise shapes.refused("the policy gives one choice; leave n out and call again for more", "n")
    if request.get("top_logprobs"):
        raise shapes.refused("log-probabilities are given of the tokens drawn alone, not of others", "top_logprobs")
    if "audio" in (request.get("modalities") or ()):
        raise shapes.refused("the policy writes text alone", "modalities")
    for name in _REFUSED:
        if request.get(name):
            raise shapes.refused("the policy writes text, and calls of `tools`, alone", name)


def _read_tools(request: dict[str, Any]) -> tuple[tuple[ToolSpec, ...], list[str]]:
    """Functions, and names of what has no effect."""
    tools, in_vain = [], []
    for tool, place in shapes.objects(request.get("tools"), "tools"):
        if tool.get("type") != "function":
            in_vain.append(f"tools.{tool.get('type')}")
            continue
        function = shapes.given(tool.get("function"))
        shapes.check(_TOOL, tool | {"function": function}, place)
        tools.append(shapes.tool_spec(function["name"], function.get("description"), function.get("parameters")))
        in_vain += ["tools.strict"] * bool(function.get("strict"))
    return tuple(tools), list(dict.fromkeys(in_vain))


def _read_message(entry: dict[str, Any], place: str) -> Message:
    role, shape = shapes.one_of(_MESSAGES, entry.get("role"), f"{place}.role")
    message = shapes.given(entry)
    text = shapes.text_of(message.get("content"), f"{place}.content", _TEXTS)
    shapes.check(shape, message, place)
    for name in ("audio", "function_call"):
        if name in message:
            raise shapes.refused("the policy reads text, and calls in `tool_calls`, alone", f"{place}.{name}")
    calls = shapes.objects(message.get("tool_calls"), f"{place}.tool_calls")
    return Message(
        role,
        text or message.get("refusal", ""),
        tuple(_read_call(*call) for call in calls),
        message.get("tool_call_id"),
    )


def _read_call(call: dict[str, Any], place: str) -> ToolCall:
    if "function" not in call:
        raise shapes.refused("the policy calls functions alone", place)
    return rendering.read_call(call["id"], call["function"]["name"], call["function"]["arguments"])


def _call_object(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": rendering.arguments_text(call)}
    return {"id": call.id, "type": "function", "function": function}


def _head(read: ReadCall, call_id: str, kind: str) -> dict[str, Any]:
    # A reply has no time of its own: the same reply makes the same answer.
    return {"id": f"chatcmpl-{call_id}", "object": kind, "created": 0, "model": read.call.model}


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": None if message["content"] is None else "", "refusal": None}
    for name in ("reasoning_content", "content"):
        for piece in rendering.deltas(message.get(name) or ""):
            yield {name: piece}
    for n, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        yield {"tool_calls": [call | {"index": n, "function": function | {"arguments": ""}}]}
        for piece in rendering.deltas(function["arguments"]):
            yield {"tool_calls": [{"index": n, "function": {"arguments": piece}}]}


def _logprobs(reply: ModelReply) -> list[dict[str, Any]]:
    return [
        {"token": piece, "bytes": list(piece.encode()), "logprob": max(logprob, _LEAST_LOGPROB), "top_logprobs": []}
        for piece, logprob in zip(reply.pieces, reply.logprobs.tolist(), strict=True)
    ]


def _usage(reply: ModelReply) -> dict[str, Any]:
    written = len(reply.token_ids)
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": written,
        "total_tokens": reply.prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }
