"""OpenAI Responses: ``POST /v1/responses``, without state: a request has its whole conversation.

A reply is an item of reasoning, a message and function calls; consecutive items of the assistant are read as one
message. Reasoning is not read back. Calls that did not parse go out as in Chat Completions.

To the policy the name of a function in a namespace begins with that, as in ``multi_agent_v1.spawn_agent``. Other
functions may have dots in their names too: which are in a namespace is known from the request alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    NamespaceToolParam,
    Response,
    ResponseFunctionToolCallParam,
)
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.responses.response_input_item_param import FunctionCallOutput
from pydantic import TypeAdapter

from agentrl.gateway import rendering, shapes
from agentrl.gateway.dialects import ReadCall
from agentrl.types.generation import FinishReason
from agentrl.types.message import Message, Role, ToolSpec
from agentrl.types.program import CallRefusedError, ModelCall, ModelReply

_SETTINGS: shapes.Shape = TypeAdapter(ResponseCreateParamsBase)
_TOOL: shapes.Shape = TypeAdapter(FunctionToolParam)
_NAMESPACE: shapes.Shape = TypeAdapter(NamespaceToolParam)
_MESSAGE: shapes.Shape = TypeAdapter(EasyInputMessageParam)
_CALL: shapes.Shape = TypeAdapter(ResponseFunctionToolCallParam)
_RESULT: shapes.Shape = TypeAdapter(FunctionCallOutput)
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ROLES = {"developer": Role.SYSTEM, "system": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}
_READ = ("model", "instructions", "max_output_tokens", "top_logprobs", "background")
_STATE = ("previous_response_id", "conversation", "prompt")
_IN_VAIN: dict[str, tuple[object, ...]] = {
    "temperature": (),
    "top_p": (),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "max_tool_calls": (),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "context_management": ([],),
    "include": ([], ["reasoning.encrypted_content"]),
    "store": (False,),
    "moderation": (),
}
_SILENT = frozenset(
    "input tools stream stream_options metadata client_metadata user service_tier safety_identifier prompt_cache_key"
    " prompt_cache_options prompt_cache_retention".split()
)
_KNOWN = frozenset(_READ) | frozenset(_STATE) | _SILENT

# By the type of a content part: what the names of its events begin with, and which of its fields they carry as well.
_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "output_text": ("response.output_text", {"logprobs": []}),
    "reasoning_text": ("response.reasoning_text", {}),
}


class ResponsesDialect(rendering.OpenAIStyle):
    """Reads and answers responses."""

    name = "responses"
    path = "/v1/responses"
    over_status = 400

    def read(self, body: bytes) -> ReadCall:
        """The call that a request's body asks for. Raises CallRefusedError."""
        request = shapes.read_object(body)
        if request.get("model") is None:
            raise shapes.refused("Field required", "model")
        _refuse_what_no_policy_gives(request)
        shapes.check_settings(_SETTINGS, request, _READ)
        tools = _Tools()
        for tool, place in shapes.objects(request.get("tools"), "tools"):
            tools.read(tool, place)
        call = ModelCall(
            model=request["model"],
            messages=shapes.conversation(_read_conversation(request), "input"),
            tools=tuple(tools.specs),
            max_tokens=shapes.token_bound(request, "max_output_tokens"),
        )
        overrides = (*shapes.in_vain(request, _IN_VAIN, _KNOWN), *dict.fromkeys(tools.in_vain))
        return ReadCall(call, shapes.flag(request, "stream"), overrides, namespaces=tools.namespaces)

    def answer(self, read: ReadCall, reply: ModelReply, call_id: str) -> dict[str, Any]:
        """The whole response."""
        is_whole = reply.finish is FinishReason.STOP
        written = len(reply.token_ids)
        response = _head(call_id, read.call.model) | {
            "status": "completed" if is_whole else "incomplete",
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": list(_items(reply, call_id, read.namespaces)),
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": written,
                # Tokens of the reasoning are not counted apart.
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + written,
            },
        }
        return Response.model_validate(response).model_dump(mode="json", by_alias=True, exclude_unset=True)

    def events(self, read: ReadCall, reply: ModelReply, call_id: str) -> Iterator[str]:
        """The response item by item: each is added, filled by deltas, and said to be done."""
        for number, (kind, data) in enumerate(_events(self.answer(read, reply, call_id))):
            yield rendering.server_event({"type": kind, "sequence_number": number} | data, kind)

    def keep_alive(self, call_id: str) -> str:
        """The response's first event: codex hears no comments, and SDKs want no other event before it."""
        begun = _head(call_id, "") | {"status": "in_progress", "output": []}
        data = {"type": "response.created", "sequence_number": 0, "response": begun}
        return rendering.server_event(data, "response.created")

    def error_event(self, refusal: CallRefusedError, call_id: str) -> str:
        """A failed response, which codex looks for, with an ``error`` beside it, on which SDKs raise."""
        error = self.error(refusal)["error"]
        failed = _head(call_id, "") | {"status": "failed", "output": []}
        failed["error"] = {"code": error["code"] or error["type"], "message": error["message"]}
        data = {"type": "response.failed", "sequence_number": 0, "response": failed, "error": error}
        return rendering.server_event(data, "response.failed")

    def echo(self, message: Message) -> Message:
        """The assistant message as it comes back."""
        return rendering.echo_with_text_arguments(message)


def _refuse_what_no_policy_gives(request: dict[str, Any]) -> None:
    for name in _STATE:
        if request.get(name) is not None:
            raise shapes.refused("nothing is kept between calls; send the whole conversation as `input`", name)
    if request.get("background"):
        raise shapes.refused("a response is given to the call that asks for it, not in the background", "background")
    if request.get("top_logprobs"):
        raise shapes.refused("log-probabilities are not given in this dialect", "top_logprobs")


@dataclass(slots=True)
class _Tools:
    """The functions of a request, those of its namespaces as `ReadCall` has them, and names of what has no effect."""

    specs: list[ToolSpec] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    in_vain: list[str] = field(default_factory=list)

    def read(self, tool: dict[str, Any], place: str) -> None:
        """Add a tool. Raises CallRefusedError."""
        if tool.get("type") != "namespace":
            self._read_function(tool, place)
            return
        namespace = {"description": ""} | shapes.given(tool)
        shapes.check(_NAMESPACE, namespace | {"tools": []}, place)
        for inner, where in shapes.objects(namespace.get("tools"), f"{place}.tools"):
            self._read_function(inner, where, namespace)

    def _read_function(self, tool: dict[str, Any], place: str, namespace: Mapping[str, Any] | None = None) -> None:
        if tool.get("type") != "function":
            self.in_vain.append(f"tools.{tool.get('type')}")
            return
        # Programs leave out what the type requires.
        shapes.check(_TOOL, {"strict": None, "parameters": None} | shapes.given(tool), place)
        name, description = tool["name"], tool.get("description")
        if namespace is not None:
            name = _full_name(namespace["name"], name)
            description = "\n\n".join(text for text in (namespace["description"], description) if text)
        if name in self.namespaces or (namespace is not None and any(name == spec.name for spec in self.specs)):
            raise shapes.refused(f"the policy knows two tools as {name!r}; give one of them another name", place)
        if namespace is not None:
            self.namespaces[name] = namespace["name"], tool["name"]
        self.specs.append(shapes.tool_spec(name, description, tool.get("parameters")))
        self.in_vain += ["tools.strict"] * bool(tool.get("strict"))


def _full_name(namespace: str, name: str) -> str:
    return f"{namespace}.{name}"


def _read_conversation(request: dict[str, Any]) -> Iterator[Message]:
    if request.get("instructions"):
        yield Message(Role.SYSTEM, request["instructions"])
    if isinstance(request.get("input"), str):
        yield Message(Role.USER, request["input"])
        return
    items = shapes.objects(request.get("input"), "input")
    run: list[Message] = []
    for message in (_read_item(item, place) for item, place in items if item.get("type") != "reasoning"):
        if run and message.role is not Role.ASSISTANT:
            yield _joined(run)
            run = []
        if message.role is Role.ASSISTANT:
            run.append(message)
        else:
            yield message
    if run:
        yield _joined(run)


def _joined(run: Iterable[Message]) -> Message:
    """The items of one reply as one message."""
    parts = tuple(run)
    return Message(Role.ASSISTANT, "".join(m.content for m in parts), tuple(c for m in parts for c in m.tool_calls))


def _read_item(entry: dict[str, Any], place: str) -> Message:
    item = shapes.given(entry)
    kind = item.get("type", "message")
    if kind == "message":
        text = shapes.text_of(item.get("content"), f"{place}.content", _TEXTS)
        # A reply comes back in parts of another type than the SDK has for messages.
        has_parts = isinstance(item.get("content"), list)
        shapes.check(_MESSAGE, item | {"content": text} if has_parts else item, place)
        return Message(_ROLES[item["role"]], text)
    if kind == "function_call":
        shapes.check(_CALL, item, place)
        name = _full_name(item["namespace"], item["name"]) if "namespace" in item else item["name"]
        return Message(Role.ASSISTANT, "", (rendering.read_call(item["call_id"], name, item["arguments"]),))
    if kind == "function_call_output":
        text = shapes.text_of(item.get("output"), f"{place}.output", _TEXTS)
        shapes.check(_RESULT, item, place)
        if "call_id" not in item:
            raise shapes.refused("Field required", f"{place}.call_id")
        return Message(Role.TOOL, text, tool_call_id=item["call_id"])
    reason = (
        "nothing is kept between calls" if kind == "item_reference" else "the policy reads messages and calls alone"
    )
    raise shapes.refused(f"an item of type {kind!r} is not read: {reason}", place)


def _items(reply: ModelReply, call_id: str, namespaces: Mapping[str, tuple[str, str]]) -> Iterator[dict[str, Any]]:
    text, calls = rendering.visible(reply.message, rendering.has_name)
    content: list[dict[str, Any]]
    if reply.message.reasoning is not None:
        content = [{"type": "reasoning_text", "text": reply.message.reasoning}]
        yield {"type": "reasoning", "id": f"rs_{call_id}", "summary": [], "content": content}
    state = "completed" if reply.finish is FinishReason.STOP else "incomplete"
    if text or not calls:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        yield {"type": "message", "id": f"msg_{call_id}", "role": "assistant", "status": state, "content": content}
    for n, call in enumerate(calls):
        function = {"call_id": call.id, "name": call.name, "arguments": rendering.arguments_text(call)}
        if call.name in namespaces:
            function["namespace"], function["name"] = namespaces[call.name]
        yield {"type": "function_call", "id": f"fc_{call_id}_{n}", "status": "completed"} | function


def _head(call_id: str, model: str) -> dict[str, Any]:
    # A reply has no time of its own: the same reply makes the same answer.
    return {
        "id": f"resp_{call_id}",
        "object": "response",
        "created_at": 0,
        "model": model,
        "error": None,
        "instructions": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def _events(response: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for n, item in enumerate(response["output"]):
        yield "response.output_item.added", {"output_index": n, "item": _empty(item)}
        where = {"output_index": n, "item_id": item["id"]}
        if item["type"] == "function_call":
            yield from _arguments(item, where)
        for index, part in enumerate(item.get("content", ())):
            yield from _part(part, where | {"content_index": index})
        yield "response.output_item.done", {"output_index": n, "item": item}
    yield f"response.{response['status']}", {"response": response}


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    """An item before its deltas."""
    if item["type"] == "function_call":
        return item | {"arguments": "", "status": "in_progress"}
    status = {"status": "in_progress"} if "status" in item else {}
    return item | status | {"content": []}


def _arguments(item: dict[str, Any], where: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for piece in rendering.deltas(item["arguments"]):
        yield "response.function_call_arguments.delta", where | {"delta": piece}
    done = {"name": item["name"], "arguments": item["arguments"]}
    yield "response.function_call_arguments.done", where | done


def _part(part: dict[str, Any], where: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    prefix, more = _PARTS[part["type"]]
    yield "response.content_part.added", where | {"part": part | {"text": ""}}
    for piece in rendering.deltas(part["text"]):
        yield f"{prefix}.delta", where | more | {"delta": piece}
    yield f"{prefix}.done", where | more | {"text": part["text"]}
    yield "response.content_part.done", where | {"part": part}
