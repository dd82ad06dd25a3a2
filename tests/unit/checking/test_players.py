from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.checking.drawing import draw_arguments
from agentrl.checking.endpoint import EndpointPlayer
from agentrl.checking.players import RandomPlayer
from agentrl.types.errors import AgentRLError
from agentrl.types.message import Message, Role, ToolCall, ToolSpec

COUNT = ToolSpec("count", "Count.", {"type": "object", "properties": {"letter": {"type": "string"}}})
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 3, "maximum": 5},
        "share": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "kind": {"enum": ["a", "b"]},
        "of": {"const": 7},
        "text": {"type": "string", "minLength": 2, "maxLength": 3},
        "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
        "tree": {"$ref": "#/$defs/Tree"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["n", "share", "kind", "of", "text", "list", "tree", "maybe"],
    "$defs": {
        "Tree": {
            "type": "object",
            "properties": {"below": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]}},
            "required": ["below"],
        }
    },
}


def is_tree(value: Any) -> bool:
    return value is None or (set(value) == {"below"} and is_tree(value["below"]))


@given(st.integers())
def test_drawn_arguments_are_what_the_schema_allows(seed: int):
    drawn = draw_arguments(SCHEMA, random.Random(seed))
    assert set(drawn) == set(SCHEMA["required"])
    assert drawn["n"] in (3, 4, 5)
    assert 0 <= drawn["share"] <= 1
    assert (drawn["kind"] in "ab", drawn["of"]) == (True, 7)
    assert len(drawn["text"]) in (2, 3)
    assert drawn["list"]
    assert {type(item) for item in drawn["list"]} == {bool}
    assert len(drawn["list"]) <= 2
    assert is_tree(drawn["tree"])
    assert drawn["maybe"] is None or type(drawn["maybe"]) is int


async def test_a_random_player_calls_tools_and_says_words_that_it_read_and_repeats_itself_by_its_seed():
    asked = [Message(Role.USER, "how many trees")]
    said = [[await player.act(asked, [COUNT]) for _ in range(40)] for player in (RandomPlayer(1), RandomPlayer(1))]
    assert said[0] == said[1]
    assert {call.name for message in said[0] for call in message.tool_calls} == {"count"}
    assert {message.content for message in said[0] if not message.tool_calls} <= {"how", "many", "trees"}
    assert not (await RandomPlayer(1).act(asked, [])).tool_calls


@contextmanager
def endpoint(status: int, answer: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server of Chat Completions that gives one answer; its address, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            asked.append({"path": self.path, "key": self.headers["authorization"], "body": json.loads(body)})
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *arguments: object) -> None:
            """Nothing is logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    thread.join()
    server.server_close()


async def test_an_endpoint_is_asked_as_openai_is_and_its_calls_are_read():
    calls = [
        {"id": "x", "type": "function", "function": {"name": "count", "arguments": '{"letter": "e"}'}},
        {"id": "y", "type": "function", "function": {"name": "count", "arguments": '{"letter"'}},
    ]
    answer = json.dumps({"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": calls}}]})
    messages = [
        Message(Role.USER, "count"),
        Message(Role.ASSISTANT, "", (ToolCall("w", "count", {"letter": "a"}),)),
        Message(Role.TOOL, "0", tool_call_id="w"),
    ]
    with endpoint(200, answer) as (url, asked):
        player = EndpointPlayer(url, "tiny", "secret")
        reply = await player.act(messages, [COUNT])
        await player.close()
    assert reply.tool_calls == (
        ToolCall("x", "count", {"letter": "e"}),
        ToolCall("y", "count", error="invalid_json", raw='{"letter"'),
    )
    [request] = asked
    assert (request["path"], request["key"]) == ("/v1/chat/completions", "Bearer secret")
    assert request["body"] == {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": "count"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "w", "type": "function", "function": {"name": "count", "arguments": '{"letter": "a"}'}}
                ],
            },
            {"role": "tool", "content": "0", "tool_call_id": "w"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "count", "description": "Count.", "parameters": COUNT.parameters},
            }
        ],
    }


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (401, "no key", r"answered 401: no key"),
        (200, "<html>", r"does not speak Chat Completions \(.*\): <html>"),
        (200, '{"choices": []}', r"does not speak Chat Completions"),
    ],
)
async def test_an_endpoint_that_refuses_or_says_something_else_is_named(status: int, answer: str, said: str):
    with endpoint(status, answer) as (url, _):
        player = EndpointPlayer(url, "tiny")
        with pytest.raises(AgentRLError, match=rf"the policy at {url} {said}"):
            await player.act([Message(Role.USER, "count")], [])
        await player.close()


async def test_an_endpoint_that_is_not_there_is_named():
    player = EndpointPlayer("http://127.0.0.1:9/v1", "tiny")
    with pytest.raises(
        AgentRLError, match=r"the policy at http://127.0.0.1:9/v1 gave no answer .*; is the address right"
    ):
        await player.act([Message(Role.USER, "count")], [])
    await player.close()
