"""The official clients get back what the policy replied, whole and as a stream."""

from __future__ import annotations

import anthropic
import openai
import pytest
from anthropic.types import RawMessageStreamEvent
from dialect_programs import FUNCTION, QUESTION, REPLIES, chat, events_in, messages, read, reply_of, responses
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from agentrl.types.generation import FinishReason
from agentrl.types.message import Message, Role, ToolCall, ToolSpec
from agentrl.types.program import CallRefusedError

MAIN = {"model": "main", "messages": QUESTION}
every_reply = pytest.mark.parametrize("name", REPLIES)
# What stream helpers add of their own.
ADDED = {"parsed", "parsed_arguments", "object", "index"}
TOO_LONG = CallRefusedError("9000 tokens, but 4096 fit", kind="context_length_exceeded", parameter="messages")


def plain(value):
    """An answer without nulls and what stream helpers add."""
    match value:
        case dict():
            return {name: plain(part) for name, part in value.items() if part is not None and name not in ADDED}
        case list():
            return [plain(part) for part in value]
        case BaseModel():
            return plain(value.model_dump())
    return value


@every_reply
def test_chat_gives_the_reply(name):
    message = REPLIES[name]
    completion = chat(message).openai().chat.completions.create(**MAIN)
    choice = completion.choices[0]
    named = [call for call in message.tool_calls if call.name]
    sent = [(call.id, call.function.name) for call in choice.message.tool_calls or []]
    assert sent == [(call.id, call.name) for call in named]
    assert choice.finish_reason == ("tool_calls" if named else "stop")
    assert choice.message.model_extra.get("reasoning_content") == message.reasoning
    assert (completion.id, completion.model) == ("chatcmpl-7", "main")
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 3, 13)
    assert usage.prompt_tokens_details.cached_tokens == 4


def test_chat_gives_text_and_arguments_as_they_were_written():
    contents = {name: chat(message).openai().chat.completions.create(**MAIN) for name, message in REPLIES.items()}
    found = {name: completion.choices[0].message for name, completion in contents.items()}
    assert found["text"].content == REPLIES["text"].content
    assert found["empty"].content == ""
    assert found["calls"].content is None
    arguments = [call.function.arguments for call in found["calls"].tool_calls]
    assert arguments == ['{"sql": "SELECT 1", "n": [1, 2.5, null]}', "{}"]
    assert found["unparsed"].content == '{"arguments": {}}'
    assert found["unparsed"].tool_calls[0].function.arguments == '{"sql": '


@every_reply
def test_a_chat_stream_adds_up_to_the_completion(name):
    served = chat(REPLIES[name])
    whole = served.openai().chat.completions.create(**MAIN)
    with served.openai().chat.completions.stream(**MAIN, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    assert plain(final) == plain(whole)


async def test_coroutines_get_the_same():
    message = REPLIES["all"]
    client = chat(message).async_openai()
    whole = await client.chat.completions.create(**MAIN)
    assert whole.choices[0].message.content == "I look."
    texts = [
        chunk.choices[0].delta.content or ""
        async for chunk in await client.chat.completions.create(**MAIN, stream=True)
    ]
    assert "".join(texts) == "I look."
    client = responses(message).async_openai()
    whole = await client.responses.create(model="main", input="hi")
    async with client.responses.stream(model="main", input="hi") as stream:
        assert (await stream.get_final_response()).output_text == whole.output_text == "I look."
    client = messages(message).async_anthropic()
    whole = await client.messages.create(**MAIN, max_tokens=9)
    async with client.messages.stream(**MAIN, max_tokens=9) as stream:
        assert plain(await stream.get_final_message()) == plain(whole)


def test_chat_gives_logprobs_where_they_are_wanted():
    served = chat(REPLIES["text"])
    assert served.openai().chat.completions.create(**MAIN).choices[0].logprobs is None
    whole = served.openai().chat.completions.create(**MAIN, logprobs=True, top_logprobs=0)
    entries = whole.choices[0].logprobs.content
    assert [(entry.token, entry.logprob, entry.bytes) for entry in entries] == [
        ("9", -0.5, [57]),
        ("é", -9999.0, [195, 169]),
        ("", 0.0, []),
    ]
    with served.openai().chat.completions.stream(**MAIN, logprobs=True) as stream:
        assert stream.get_final_completion().choices[0].logprobs.content == entries


def test_a_chat_stream_has_usage_only_where_it_is_asked_for():
    client = chat(REPLIES["text"]).openai()
    chunks = list(client.chat.completions.create(**MAIN, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    asked = list(client.chat.completions.create(**MAIN, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage.total_tokens for chunk in asked if not chunk.choices] == [13]


@every_reply
def test_responses_give_the_reply(name):
    message = REPLIES[name]
    response = responses(message).openai().responses.create(model="main", input="hi")
    calls = [(item.call_id, item.name) for item in response.output if item.type == "function_call"]
    assert calls == [(call.id, call.name) for call in message.tool_calls if call.name]
    reasoning = [item.content[0].text for item in response.output if item.type == "reasoning"]
    assert reasoning == ([message.reasoning] if message.reasoning else [])
    assert response.output_text == ('{"arguments": {}}' if name == "unparsed" else message.content)
    assert (response.id, response.status, response.incomplete_details) == ("resp_7", "completed", None)
    assert (response.usage.input_tokens, response.usage.output_tokens) == (10, 3)
    assert response.usage.input_tokens_details.cached_tokens == 4


def test_responses_name_a_tool_of_a_namespace_as_the_program_does():
    inner = {"type": "function", "name": "find", "parameters": FUNCTION["parameters"]}
    tools = [{"type": "namespace", "name": "docs", "description": "", "tools": [inner]}]
    calls = (ToolCall("a", "docs.find"), ToolCall("b", "find.all"))
    served = responses(Message(Role.ASSISTANT, "", calls))
    asked = {"model": "main", "input": "hi", "tools": tools}
    whole = served.openai().responses.create(**asked)
    assert [(item.namespace, item.name) for item in whole.output] == [("docs", "find"), (None, "find.all")]
    with served.openai().responses.stream(**asked) as stream:
        events = list(stream)
        assert plain(stream.get_final_response()) == plain(whole)
    items = [event.item for event in events if event.type.startswith("response.output_item.")]
    assert [item.namespace for item in items] == ["docs", "docs", None, None]
    assert [event.name for event in events if event.type == "response.function_call_arguments.done"] == [
        "find",
        "find.all",
    ]


@every_reply
def test_a_responses_stream_adds_up_to_the_response(name):
    client = responses(REPLIES[name]).openai()
    whole = client.responses.create(model="main", input="hi")
    texts, arguments = "", ""
    with client.responses.stream(model="main", input="hi") as stream:
        for event in stream:
            texts += event.delta if event.type == "response.output_text.delta" else ""
            arguments += event.delta if event.type == "response.function_call_arguments.delta" else ""
        final = stream.get_final_response()
    assert texts == whole.output_text
    assert arguments == "".join(item.arguments for item in whole.output if item.type == "function_call")
    assert plain(final) == plain(whole)


@every_reply
def test_messages_give_the_reply(name):
    message = REPLIES[name]
    answer = messages(message).anthropic().messages.create(**MAIN, max_tokens=9)
    calls = [(block.id, block.name, block.input) for block in answer.content if block.type == "tool_use"]
    assert calls == [(call.id, call.name, call.arguments) for call in message.tool_calls if call.error is None]
    text = "".join(block.text for block in answer.content if block.type == "text")
    assert text == ('{"sql": \n\n{"arguments": {}}' if name == "unparsed" else message.content)
    thoughts = [block.thinking for block in answer.content if block.type == "thinking"]
    assert thoughts == ([message.reasoning] if message.reasoning else [])
    assert answer.stop_reason == ("tool_use" if calls else "end_turn")
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (6, 4, 3)


@every_reply
def test_a_messages_stream_adds_up_to_the_message(name):
    client = messages(REPLIES[name]).anthropic()
    whole = client.messages.create(**MAIN, max_tokens=9)
    with client.messages.stream(**MAIN, max_tokens=9) as stream:
        assert plain(stream.get_final_message()) == plain(whole)


@every_reply
def test_every_event_is_one_that_the_sdks_know(name):
    adapters = {
        chat: TypeAdapter(ChatCompletionChunk),
        responses: TypeAdapter(ResponseStreamEvent),
        messages: TypeAdapter(RawMessageStreamEvent),
    }
    for make, adapter in adapters.items():
        served = make(REPLIES[name])
        body = {"model": "main", "max_tokens": 9, "stream": True, "input": "hi", "messages": QUESTION}
        stream = list(served.dialect.events(read(served.dialect, body), served.reply, "7"))
        for event in events_in([piece for piece in stream if piece != "data: [DONE]\n\n"]):
            adapter.validate_python(event)


def test_a_long_text_comes_in_a_few_deltas():
    served = messages(Message(Role.ASSISTANT, "word " * 1000))
    events = events_in(list(served.dialect.events(read(served.dialect, MAIN | {"max_tokens": 9}), served.reply, "7")))
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert (len(texts), "".join(texts)) == (4, "word " * 1000)


def test_what_has_deltas_begins_empty():
    """Some clients append deltas to what a block or an item begins with."""
    served = messages(REPLIES["all"])
    events = events_in(list(served.dialect.events(read(served.dialect, MAIN | {"max_tokens": 9}), served.reply, "7")))
    assert [event["content_block"] for event in events if event["type"] == "content_block_start"] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call-0", "name": "query", "input": {}},
    ]
    served = responses(REPLIES["all"])
    events = events_in(
        list(served.dialect.events(read(served.dialect, {"model": "m", "input": "hi"}), served.reply, "7"))
    )
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item.get("content", item.get("arguments")) for item in added] == [[], [], ""]


def test_a_reply_that_was_cut_off_says_so():
    cut = (Message(Role.ASSISTANT, "The ans"), FinishReason.LENGTH)
    assert chat(*cut).openai().chat.completions.create(**MAIN).choices[0].finish_reason == "length"
    response = responses(*cut).openai().responses.create(model="main", input="hi")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with responses(*cut).openai().responses.stream(model="main", input="hi") as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"
    assert messages(*cut).anthropic().messages.create(**MAIN, max_tokens=9).stop_reason == "max_tokens"


def test_tools_of_the_sdks_arrive():
    expected = (ToolSpec(FUNCTION["name"], FUNCTION["description"], FUNCTION["parameters"]),)
    served = chat(REPLIES["text"])
    served.openai().chat.completions.create(**MAIN, tools=[{"type": "function", "function": FUNCTION}])
    assert served.read[-1].call.tools == expected
    served = responses(REPLIES["text"])
    served.openai().responses.create(model="main", input="hi", tools=[{"type": "function", "strict": False} | FUNCTION])
    assert served.read[-1].call.tools == expected
    served = messages(REPLIES["text"])
    tool = {"name": "query", "description": "Run SQL.", "input_schema": FUNCTION["parameters"]}
    served.anthropic().messages.create(**MAIN, max_tokens=9, tools=[tool])
    assert served.read[-1].call.tools == expected
    assert served.read[-1].call.max_tokens == 9


def test_clients_raise_the_error_of_a_refusal():
    with pytest.raises(openai.BadRequestError, match=r"n: the policy gives one choice") as chat_error:
        chat(REPLIES["text"]).openai().chat.completions.create(**MAIN, n=2)
    assert (chat_error.value.param, chat_error.value.type) == ("n", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="nothing is kept between calls") as state_error:
        responses(REPLIES["text"]).openai().responses.create(model="main", input="hi", previous_response_id="r")
    assert state_error.value.param == "previous_response_id"
    history = [*QUESTION, {"role": "assistant", "content": "The answer is"}]
    with pytest.raises(anthropic.BadRequestError, match="must end with a message of the user"):
        messages(REPLIES["text"]).anthropic().messages.create(model="main", max_tokens=9, messages=history)


def test_an_error_says_in_the_dialects_own_words_that_a_prompt_is_too_long():
    assert chat(REPLIES["text"]).dialect.error(TOO_LONG)["error"] == {
        "message": "9000 tokens, but 4096 fit",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    error = messages(REPLIES["text"]).dialect.error(TOO_LONG)
    assert error["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 9000 tokens, but 4096 fit",
    }


@pytest.mark.parametrize(
    ("status", "openai_kind", "anthropic_kind"),
    [
        (401, "invalid_request_error", "authentication_error"),
        (429, "rate_limit_error", "rate_limit_error"),
        (503, "server_error", "api_error"),
    ],
)
def test_an_error_has_the_type_of_its_status(status, openai_kind, anthropic_kind):
    refusal = CallRefusedError("no", status=status, kind="session_ended")
    found = chat(REPLIES["text"]).dialect.error(refusal)["error"]
    assert (found["type"], found["code"]) == (openai_kind, "session_ended")
    assert messages(REPLIES["text"]).dialect.error(refusal)["error"]["type"] == anthropic_kind


def test_clients_raise_the_error_of_a_stream_that_had_begun():
    def broken(served):
        served.dialect.events = lambda *_: iter([served.dialect.error_event(TOO_LONG, "7")])
        return served

    with pytest.raises(openai.APIError, match="4096 fit"):
        list(broken(chat(REPLIES["text"])).openai().chat.completions.create(**MAIN, stream=True))
    with pytest.raises(openai.APIError, match="4096 fit"):
        list(broken(responses(REPLIES["text"])).openai().responses.create(model="main", input="hi", stream=True))
    with pytest.raises(anthropic.APIStatusError, match="4096 fit"):
        list(broken(messages(REPLIES["text"])).anthropic().messages.create(**MAIN, max_tokens=9, stream=True))


def test_the_same_reply_makes_the_same_answer():
    for make in (chat, responses, messages):
        served = make(REPLIES["all"])
        call = read(served.dialect, {"model": "main", "max_tokens": 9, "input": "hi", "messages": QUESTION})
        one, two = (served.dialect.answer(call, reply_of(REPLIES["all"]), "7") for _ in range(2))
        assert one == two
