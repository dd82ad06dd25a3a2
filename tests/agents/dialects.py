"""The three dialects as far as three agents use them: requests to messages, and a message to JSON or events."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Protocol

from agentrl.types.message import Message, Role, ToolCall

Json = dict[str, Any]


class Dialect(Protocol):
    name: str
    keep_alive: str

    def messages(self, body: Json) -> list[Message]: ...

    def reply(self, message: Message, body: Json, number: int) -> Json: ...

    def events(self, message: Message, body: Json, number: int) -> list[str]: ...


def text_of(content: Any) -> str:
    """The text of a content that is a string, or a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text", "") if isinstance(part, dict) else str(part) for part in content)


def _arguments(text: str) -> Json:
    return json.loads(text) if text else {}


def _sse(data: Json, name: str | None = None) -> str:
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"


class Chat:
    """OpenAI Chat Completions."""

    name = "chat"
    keep_alive = ": keep-alive\n\n"

    def messages(self, body: Json) -> list[Message]:
        return [self._message(raw) for raw in body["messages"]]

    def _message(self, raw: Json) -> Message:
        calls = tuple(
            ToolCall(call["id"], call["function"]["name"], _arguments(call["function"]["arguments"]))
            for call in raw.get("tool_calls") or ()
        )
        role = Role("system" if raw["role"] == "developer" else raw["role"])
        return Message(role, text_of(raw.get("content")), calls, raw.get("tool_call_id"))

    def reply(self, message: Message, body: Json, number: int) -> Json:
        said: Json = {"role": "assistant", "content": message.content or None}
        if message.tool_calls:
            said["tool_calls"] = self._calls(message)
        choice = {"index": 0, "message": said, "finish_reason": self._finish(message)}
        return {**self._head(body, number), "object": "chat.completion", "choices": [choice], "usage": self._usage()}

    def events(self, message: Message, body: Json, number: int) -> list[str]:
        head = {**self._head(body, number), "object": "chat.completion.chunk"}
        delta: Json = {"role": "assistant", "content": message.content}
        if message.tool_calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(self._calls(message))]
        chunks = [
            {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": self._finish(message)}]},
            {**head, "choices": [], "usage": self._usage()},
        ]
        return [*map(_sse, chunks), "data: [DONE]\n\n"]

    def _head(self, body: Json, number: int) -> Json:
        return {"id": f"chatcmpl-{number}", "created": 0, "model": body["model"]}

    def _calls(self, message: Message) -> list[Json]:
        return [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in message.tool_calls
        ]

    def _finish(self, message: Message) -> str:
        return "tool_calls" if message.tool_calls else "stop"

    def _usage(self) -> Json:
        return {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}


class Responses:
    """OpenAI Responses."""

    name = "responses"
    keep_alive = ": keep-alive\n\n"

    def messages(self, body: Json) -> list[Message]:
        found = [Message(Role.SYSTEM, body["instructions"])] if body.get("instructions") else []
        items = body["input"] if isinstance(body["input"], list) else [{"role": "user", "content": body["input"]}]
        for message in (message for item in items for message in self._of_item(item)):
            if message.role is Role.ASSISTANT and found and found[-1].role is Role.ASSISTANT:
                last = found.pop()
                joined = (*last.tool_calls, *message.tool_calls)
                message = Message(Role.ASSISTANT, last.content + message.content, joined)
            found.append(message)
        return found

    def _of_item(self, item: Json) -> Iterable[Message]:
        match item.get("type", "message"):
            case "message":
                role = Role("system" if item["role"] == "developer" else item["role"])
                yield Message(role, text_of(item["content"]))
            case "function_call":
                name = ".".join(part for part in (item.get("namespace"), item["name"]) if part)
                call = ToolCall(item["call_id"], name, _arguments(item["arguments"]))
                yield Message(Role.ASSISTANT, tool_calls=(call,))
            case "custom_tool_call":
                yield Message(
                    Role.ASSISTANT, tool_calls=(ToolCall(item["call_id"], item["name"], {"input": item["input"]}),)
                )
            case "function_call_output" | "custom_tool_call_output":
                yield Message(Role.TOOL, text_of(item["output"]), tool_call_id=item["call_id"])

    def reply(self, message: Message, body: Json, number: int) -> Json:
        return {**self._head(body, number), "status": "completed", "output": self._items(message, body, number)}

    def events(self, message: Message, body: Json, number: int) -> list[str]:
        items, head = self._items(message, body, number), self._head(body, number)
        events: list[Json] = [{"type": "response.created", "response": {**head, "status": "in_progress", "output": []}}]
        for index, item in enumerate(items):
            place = {"output_index": index, "item_id": item["id"]}
            events.append({"type": "response.output_item.added", "output_index": index, "item": _emptied(item)})
            if item["type"] == "message":
                text = item["content"][0]["text"]
                events.append({"type": "response.output_text.delta", **place, "content_index": 0, "delta": text})
                events.append({"type": "response.output_text.done", **place, "content_index": 0, "text": text})
            events.append({"type": "response.output_item.done", "output_index": index, "item": item})
        events.append({"type": "response.completed", "response": {**head, "status": "completed", "output": items}})
        return [_sse({**event, "sequence_number": i}, event["type"]) for i, event in enumerate(events)]

    def _head(self, body: Json, number: int) -> Json:
        counts = {"input_tokens": 100, "output_tokens": 10, "total_tokens": 110}
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        head = {"id": f"resp_{number}", "object": "response", "created_at": 0, "model": body["model"]}
        return {**head, "usage": {**counts, **details}, "error": None, "incomplete_details": None}

    def _items(self, message: Message, body: Json, number: int) -> list[Json]:
        items: list[Json] = []
        if message.content:
            part = {"type": "output_text", "text": message.content, "annotations": []}
            said = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed"}
            items.append({**said, "content": [part]})
        for i, call in enumerate(message.tool_calls):
            namespace, _, name = call.name.rpartition(".")
            item: Json = {"id": f"fc_{number}_{i}", "type": "function_call", "call_id": call.id, "name": name}
            item |= {"namespace": namespace} if namespace else {}
            items.append({**item, "arguments": json.dumps(call.arguments), "status": "completed"})
        return items


def _emptied(item: Json) -> Json:
    blank = {"content": [], "arguments": ""}
    return {**item, "status": "in_progress", **{name: value for name, value in blank.items() if name in item}}


class Anthropic:
    """Anthropic Messages."""

    name = "messages"
    keep_alive = 'event: ping\ndata: {"type": "ping"}\n\n'

    def messages(self, body: Json) -> list[Message]:
        found = [Message(Role.SYSTEM, text_of(body.get("system")))]
        for raw in body["messages"]:
            found += self._of_raw(raw)
        return found

    def _of_raw(self, raw: Json) -> Iterable[Message]:
        content = raw["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if raw["role"] == "assistant":
            calls = (ToolCall(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use")
            text = "".join(b["text"] for b in blocks if b["type"] == "text")
            yield Message(Role.ASSISTANT, text, tuple(calls))
            return
        for block in blocks:
            if block["type"] == "tool_result":
                yield Message(Role.TOOL, text_of(block.get("content")), tool_call_id=block["tool_use_id"])
        if text := "".join(block["text"] for block in blocks if block["type"] == "text"):
            yield Message(Role(raw["role"]), text)

    def reply(self, message: Message, body: Json, number: int) -> Json:
        head = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": body["model"]}
        end = {"stop_reason": self._finish(message), "stop_sequence": None}
        return {**head, "content": self._blocks(message), **end, "usage": self._usage()}

    def events(self, message: Message, body: Json, number: int) -> list[str]:
        start = {**self.reply(message, body, number), "content": [], "stop_reason": None}
        events: list[Json] = [{"type": "message_start", "message": start}]
        for index, block in enumerate(self._blocks(message)):
            if block["type"] == "text":
                empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                written = json.dumps(block["input"])
                empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": written}
            events.append({"type": "content_block_start", "index": index, "content_block": empty})
            events.append({"type": "content_block_delta", "index": index, "delta": delta})
            events.append({"type": "content_block_stop", "index": index})
        end = {"stop_reason": self._finish(message), "stop_sequence": None}
        events.append({"type": "message_delta", "delta": end, "usage": self._usage()})
        events.append({"type": "message_stop"})
        return [_sse(event, event["type"]) for event in events]

    def _blocks(self, message: Message) -> list[Json]:
        text: list[Json] = [{"type": "text", "text": message.content}] if message.content else []
        calls = message.tool_calls
        return text + [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in calls]

    def _finish(self, message: Message) -> str:
        return "tool_use" if message.tool_calls else "end_turn"

    def _usage(self) -> Json:
        return {"input_tokens": 100, "output_tokens": 10}


ROUTES: dict[str, Dialect] = {
    "/v1/chat/completions": Chat(),
    "/v1/responses": Responses(),
    "/v1/messages": Anthropic(),
}


def names_of(tools: Iterable[Json]) -> list[str]:
    """What a policy may call: functions, and those of namespaces behind the name of these."""
    found = []
    for tool in tools:
        if tool.get("type") == "namespace":
            found += [f"{tool['name']}.{inner}" for inner in names_of(tool["tools"])]
        else:
            found.append(tool.get("function", tool)["name"])
    return found
