"""The stream of a response: every item is added, filled by deltas, and said to be done."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from agentrl.gateway import rendering

# By the type of a content part: what the names of its events begin with, and which of its fields they carry as well.
_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "output_text": ("response.output_text", {"logprobs": []}),
    "reasoning_text": ("response.reasoning_text", {}),
}


def events_of(response: dict[str, Any]) -> Iterator[str]:
    """A response as server-sent events, numbered from 0."""
    numbers = itertools.count()
    for kind, data in _events(response):
        yield rendering.server_event({"type": kind, "sequence_number": next(numbers)} | data, kind)


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
