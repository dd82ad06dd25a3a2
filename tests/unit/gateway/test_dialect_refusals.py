"""Requests that no policy can answer: each is refused with a sentence that names the place."""

from __future__ import annotations

import json

import pytest
from dialect_programs import FUNCTION, QUESTION, read

from agentrl.gateway.chat import ChatDialect
from agentrl.gateway.messages import MessagesDialect
from agentrl.gateway.responses import ResponsesDialect
from agentrl.gateway.token_ids import TokenIdsDialect
from agentrl.types.program import CallRefusedError

CHAT = {"model": "main", "messages": QUESTION}
RESPONSES = {"model": "main", "input": "hi"}
MESSAGES = {"model": "main", "max_tokens": 9, "messages": QUESTION}
DIALECTS = (ChatDialect(), ResponsesDialect(), MessagesDialect(), TokenIdsDialect())
IMAGE = "data:image/png;base64,AAAA"


NAMESPACE = {"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "b"}]}


def user(content: object) -> dict:
    """A conversation of one message."""
    return {"messages": [{"role": "user", "content": content}]}


def asked(*items: object) -> dict:
    """Items of an input."""
    return {"input": list(items)}


def refusal_of(dialect, request: dict) -> CallRefusedError:
    """Why a request is refused, in one line and with status 400."""
    with pytest.raises(CallRefusedError) as caught:
        read(dialect, request)
    assert caught.value.status == 400
    assert "\n" not in str(caught.value)
    assert dialect.error(caught.value)["error"]["message"] == str(caught.value)
    return caught.value


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"model": NaN}', b'"\\ud800"', b"\xff\xfe", b"[]", b"null", b'"hi"', b"[" * 100_000],
    ids=["empty", "half", "nan", "surrogate", "not utf-8", "list", "null", "string", "deep"],
)
def test_a_body_that_is_no_json_object(dialect, body):
    with pytest.raises(CallRefusedError, match="the request's body is not"):
        dialect.read(body)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_an_empty_object(dialect):
    refusal = refusal_of(dialect, {})
    assert "Field required" in str(refusal)
    assert refusal.parameter in ("model", "max_tokens")


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "name": "f", "content": "hi"}]}, "messages[0].role"),
        (user(5), "messages[0].content"),
        (user({}), "messages[0].content"),
        (user([{"type": "text"}]), "messages[0].content[0].text"),
        (user([{"type": "text", "text": 5}]), "messages[0].content[0].text"),
        (user([{"type": "image_url", "image_url": {"url": IMAGE}}]), "messages[0].content[0]"),
        (user([{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}]), "messages[0].content[1]"),
        (user([{"type": "file", "file": {"file_id": "f"}}]), "messages[0].content[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}, *QUESTION]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}, *QUESTION]},
            "messages[0].tool_calls[0].function",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}},
                        ],
                    },
                    *QUESTION,
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "f", "input": ""}}],
                    },
                    *QUESTION,
                ]
            },
            "messages[0].tool_calls[0]",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, *QUESTION]},
            "messages[0].function_call",
        ),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "The answer is"}]}, "messages"),
        ({"model": 5}, "model"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"n": "1"}, "n"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 5}, "stream_options"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"functions": [FUNCTION]}, "functions"),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"description": ""}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": FUNCTION | {"parameters": []}}]},
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_chat_refuses(change, place):
    assert refusal_of(ChatDialect(), CHAT | change).parameter == place


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        (asked("hi"), "input[0]"),
        (asked({"role": "robot", "content": "hi"}), "input[0].role"),
        (asked({"role": "user"}), "input[0].content"),
        (asked({"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}), "input[0].content[0]"),
        (asked({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}), "input[0].content[0]"),
        (asked({"role": "user", "content": [{"type": "input_text"}]}), "input[0].content[0].text"),
        (asked({"type": "function_call", "name": "f", "call_id": "a"}, *QUESTION), "input[0].arguments"),
        (asked({"type": "function_call_output", "call_id": "a"}), "input[0].output"),
        (asked({"type": "function_call_output", "output": "1"}), "input[0].call_id"),
        (
            asked(
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": [{"type": "input_image", "image_url": IMAGE}],
                }
            ),
            "input[0].output[0]",
        ),
        (asked({"type": "item_reference", "id": "msg_1"}), "input[0]"),
        (asked({"type": "custom_tool_call", "name": "f", "call_id": "a", "input": ""}, *QUESTION), "input[0]"),
        (asked(*QUESTION, {"role": "assistant", "content": "The answer is"}), "input"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True}, "background"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"instructions": ["hi"]}, "instructions"),
        ({"stream": 1}, "stream"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": "none"}]}, "tools[0].parameters"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [NAMESPACE, {"type": "function", "name": "a.b"}]}, "tools[1]"),
        ({"tools": [{"type": "function", "name": "a.b"}, NAMESPACE]}, "tools[1].tools[0]"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
    ],
)
def test_what_responses_refuse(change, place):
    assert refusal_of(ResponsesDialect(), RESPONSES | change).parameter == place


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (user(5), "messages[0].content"),
        (user([{"type": "text"}]), "messages[0].content[0].text"),
        (user([{"type": "image", "source": {"type": "url", "url": IMAGE}}]), "messages[0].content[0]"),
        (user([{"type": "document", "source": {"type": "file", "file_id": "f"}}]), "messages[0].content[0]"),
        (user([{"type": "tool_result"}]), "messages[0].content[0].tool_use_id"),
        (
            user([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {}}]}]),
            "messages[0].content[0].content[0]",
        ),
        (user([{"type": "tool_use", "id": "a", "name": "f", "input": {}}]), "messages[0].content[0]"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}, *QUESTION]},
            "messages[0].content[0].input",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use", "id": "a"}]}, *QUESTION]},
            "messages[0].content[0]",
        ),
        ({"messages": [*QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "The"}]}]}, "messages"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {"type": "object"}}]}, "tools[0].name"),
    ],
)
def test_what_messages_refuse(change, place):
    refusal = refusal_of(MessagesDialect(), MESSAGES | change)
    assert refusal.parameter == place


def test_a_refusal_says_what_to_do_instead():
    assert str(refusal_of(ResponsesDialect(), RESPONSES | {"previous_response_id": "resp_1"})) == (
        "previous_response_id: nothing is kept between calls; send the whole conversation as `input`"
    )
    image = user([{"type": "image_url", "image_url": {"url": IMAGE}}])
    assert str(refusal_of(ChatDialect(), CHAT | image)) == (
        "messages[0].content[0]: content of type 'image_url' is no text, and the policy reads text alone"
    )


def test_the_last_of_many_items_is_checked_as_the_first():
    """pydantic looks at the items of an iterable only when they are asked for."""
    calls = [{"id": f"{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(50)]
    calls[-1]["function"]["name"] = None
    history = [{"role": "assistant", "tool_calls": calls}, *QUESTION]
    assert refusal_of(ChatDialect(), CHAT | {"messages": history}).parameter == (
        "messages[0].tool_calls[49].function.name"
    )


def test_a_request_of_another_dialect_is_refused():
    for dialect, request in ((ChatDialect(), RESPONSES), (ResponsesDialect(), CHAT), (MessagesDialect(), CHAT)):
        assert json.dumps(dialect.error(refusal_of(dialect, request)))
