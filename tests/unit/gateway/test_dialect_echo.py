"""A program that sends an answer back verbatim continues the conversation that the policy has."""

from __future__ import annotations

import pytest
from dialect_programs import QUESTION, REPLIES, Served, chat, messages, read, responses
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl.types.message import Message, Role, ToolCall

SPAWN = "multi_agent_v1.spawn_agent"
NAMESPACE = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Sub-agents.",
    "tools": [{"type": "function", "name": "spawn_agent"}],
}
NAMES = st.text("abc_-XYZ.é ", min_size=1, max_size=12) | st.sampled_from(
    ["\ud800", "a\nb", "\u2028", "a.b", ".", ".a", "a.", SPAWN]
)
IDS = st.uuids().map(str)
LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text() | st.just("\ud800")
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6
)
PARSED = st.builds(ToolCall, IDS, NAMES, st.dictionaries(st.text(), VALUES, max_size=3))
ERRORS = st.sampled_from(["invalid_json", "unclosed_block", "missing_name", "unknown_tool"])
RAW = st.text() | st.sampled_from(['{"sql": ', "[1]", '{"name": "x"}', "{}", "null", '{"x": NaN}', "\x1f\u2028\x85"])
UNPARSED = st.builds(ToolCall, IDS, NAMES | st.just(""), st.just({}), ERRORS, RAW)
MESSAGES = st.builds(
    Message,
    st.just(Role.ASSISTANT),
    st.text(),
    st.lists(PARSED | UNPARSED, max_size=3, unique_by=lambda call: call.id).map(tuple),
    st.none(),
    st.none() | st.text(),
)


def through_chat(served: Served, is_streamed: bool) -> None:
    """Ask, and send the answer back with one more question."""
    client = served.openai()
    if is_streamed:
        with client.chat.completions.stream(model="main", messages=QUESTION) as stream:
            answer = stream.get_final_completion()
    else:
        answer = client.chat.completions.create(model="main", messages=QUESTION)
    history = [*QUESTION, answer.choices[0].message, *QUESTION]
    client.chat.completions.create(model="main", messages=history)


def through_responses(served: Served, is_streamed: bool) -> None:
    """The same with Responses, with a tool in a namespace."""
    client = served.openai()
    asked = {"model": "main", "tools": [NAMESPACE]}
    if is_streamed:
        with client.responses.stream(**asked, input=QUESTION) as stream:
            answer = stream.get_final_response()
    else:
        answer = client.responses.create(**asked, input=QUESTION)
    client.responses.create(**asked, input=[*QUESTION, *answer.output, *QUESTION])


def through_messages(served: Served, is_streamed: bool) -> None:
    """The same with Messages."""
    client = served.anthropic()
    asked = {"model": "main", "max_tokens": 9}
    if is_streamed:
        with client.messages.stream(**asked, messages=QUESTION) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**asked, messages=QUESTION)
    history = [*QUESTION, {"role": "assistant", "content": answer.content}, *QUESTION]
    client.messages.create(**asked, messages=history)


WAYS = {
    "chat": (chat, through_chat),
    "responses": (responses, through_responses),
    "messages": (messages, through_messages),
}
every_dialect = pytest.mark.parametrize("dialect", WAYS)


@every_dialect
@pytest.mark.parametrize("is_streamed", [False, True])
@settings(max_examples=20)
@given(message=MESSAGES)
@example(message=Message(Role.ASSISTANT, "", (ToolCall("a", "query", {"x": float("nan")}),)))
@example(message=Message(Role.ASSISTANT, "", (ToolCall("a", "query", {"\ud800": 1}),)))
@example(message=Message(Role.ASSISTANT, "", (ToolCall("a", SPAWN, {"message": "Look."}), ToolCall("b", "query"))))
def test_an_answer_that_comes_back_reads_as_its_echo(dialect, is_streamed, message):
    make, send = WAYS[dialect]
    served = make(message)
    send(served, is_streamed)
    question, echo, again = served.read[-1].call.messages
    assert echo == served.dialect.echo(message)
    assert question == again == Message(Role.USER, "hi")
    assert echo.reasoning is None


@every_dialect
@settings(max_examples=20)
@given(message=MESSAGES)
def test_an_echo_is_its_own_echo(dialect, message):
    echo = WAYS[dialect][0](message).dialect.echo
    assert echo(echo(message)) == echo(message)


@every_dialect
def test_an_echo_keeps_what_parsed_as_it_is(dialect):
    message = REPLIES["calls"]
    assert WAYS[dialect][0](message).dialect.echo(message) == message
    with_reasoning = REPLIES["all"]
    expected = Message(Role.ASSISTANT, with_reasoning.content, with_reasoning.tool_calls)
    assert WAYS[dialect][0](message).dialect.echo(with_reasoning) == expected


@every_dialect
def test_an_echo_of_calls_that_did_not_parse(dialect):
    echo = WAYS[dialect][0](REPLIES["unparsed"]).dialect.echo(REPLIES["unparsed"])
    as_call = ToolCall("call-0", "query", {}, "invalid_json", '{"sql": ')
    assert echo == (
        Message(Role.ASSISTANT, '{"sql": \n\n{"arguments": {}}')
        if dialect == "messages"
        else Message(Role.ASSISTANT, '{"arguments": {}}', (as_call,))
    )


def test_reasoning_may_come_back_or_not():
    for name, dialect in {name: make(REPLIES["all"]).dialect for name, (make, _) in WAYS.items()}.items():
        with_it, without = ASSISTANTS[name]
        found = [_last_assistant(dialect, name, items) for items in (with_it, without)]
        assert found == [Message(Role.ASSISTANT, "I look.")] * 2


ASSISTANTS = {
    "chat": (
        [{"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}],
        [{"role": "assistant", "content": "I look."}],
    ),
    "responses": (
        [{"type": "reasoning", "summary": [], "encrypted_content": None}, {"role": "assistant", "content": "I look."}],
        [{"role": "assistant", "content": "I look."}],
    ),
    "messages": (
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "I look."},
                ],
            }
        ],
        [{"role": "assistant", "content": "I look."}],
    ),
}


def _last_assistant(dialect, name: str, items: list[dict]) -> Message:
    conversation = [*QUESTION, *items, *QUESTION]
    body = {"model": "main", "max_tokens": 9, ("input" if name == "responses" else "messages"): conversation}
    return read(dialect, body).call.messages[1]
