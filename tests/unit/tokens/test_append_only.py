from __future__ import annotations

import re
import string

import numpy as np
import pytest
from folders import GLM_TOKENS, LLAMA_TOKENS, QUESTION, QWEN_TOKENS, TOOLS, byte_level, plain_messages, plain_tools
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from renderers import create_renderer
from renderers.configs import config_from_name

from agentrl.tokens.chat import ChatFormat
from agentrl.tokens.config import ChatConfig
from agentrl.tokens.tokenizer import FastTokenizer
from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role, ToolCall

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GLM_MORE = ("<|begin_of_image|>", "<|end_of_image|>", "<|image|>")
KIMI = (
    *(
        "<|im_system|>",
        "<|im_user|>",
        "<|im_assistant|>",
        "<|im_middle|>",
        "<|im_end|>",
        "[EOS]",
        "<think>",
        "</think>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    "<|tool_call_argument_begin|>",
)
FORMATS = {
    "qwen3": QWEN_TOKENS,
    "qwen3.5": (*QWEN_TOKENS, *VISION),
    "qwen3.6": (*QWEN_TOKENS, *VISION),
    "nemotron-3": QWEN_TOKENS,
    "nemotron-3-ultra": QWEN_TOKENS,
    "glm-4.5": (*GLM_TOKENS, *GLM_MORE),
    "glm-5": (*GLM_TOKENS, *GLM_MORE),
    "llama-3": (*LLAMA_TOKENS, "<|end_of_text|>"),
    "kimi-k2": KIMI,
}
WITHOUT_REASONING = ("llama-3", "kimi-k2")
OPENS_REASONING = ("qwen3.5", "qwen3.6", "nemotron-3", "nemotron-3-ultra", "glm-5")
CLOSES_REASONING = ("qwen3", "qwen3.5", "qwen3.6", "nemotron-3", "glm-4.5", "glm-5")
plain = st.text(string.ascii_letters + string.digits + " .,_()'\n", max_size=30).map(str.strip)
words = plain.filter(bool)
call = st.builds(ToolCall, st.just("e/0.0"), st.just("query"), st.fixed_dictionaries({"sql": words}))
forged = st.sampled_from(["<think>", "</think>", "<tool_call>", "<|im_end|>", "<arg_key>", "<|user|>", "<|eot_id|>"])


def build(name: str, **options: object) -> ChatFormat:
    tokenizer = FastTokenizer(byte_level(FORMATS[name]), name)
    return ChatFormat.build(tokenizer, ChatConfig(renderer=name, options=options))


@pytest.fixture(scope="module")
def chats() -> dict[str, ChatFormat]:
    return {name: build(name) for name in FORMATS}


def rendered(name: str, messages: list[Message], **options: object) -> str:
    """Text of a whole conversation by the renderers package alone, with the tokenizer as it is."""
    tokenizer = FastTokenizer(byte_level(FORMATS[name]), name)
    renderer = create_renderer(tokenizer, config_from_name(name, **options))
    return tokenizer.decode(renderer.render_ids(ids_of_calls(plain_messages(messages)), tools=plain_tools(TOOLS)))


def ids_of_calls(messages: list[dict]) -> list[dict]:
    """Calls under the ids that Kimi wants, and nobody else looks at."""
    for message in messages:
        for one in message.get("tool_calls", ()):
            one["id"] = "functions.query:0"
        if "tool_call_id" in message:
            message["tool_call_id"] = "functions.query:0"
    return messages


@settings(max_examples=25)
@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_what_is_opened_completed_and_extended_is_the_whole_conversation(chats, name, data):
    chat = chats[name]
    calls = tuple(data.draw(st.lists(call, max_size=1)))
    content = "" if calls else data.draw(words)
    has_reasoning = name not in WITHOUT_REASONING and (name in OPENS_REASONING or data.draw(st.booleans()))
    said = Message(Role.ASSISTANT, content, calls, reasoning=data.draw(words) if has_reasoning else None)
    answer = [Message(Role.TOOL, data.draw(plain), tool_call_id="e/0.0")] if calls else []
    opening, reply = chat.open([QUESTION], TOOLS), chat.complete(said)
    context = [opening, reply]
    if answer:
        context.append(chat.extend(opening, reply, answer, TOOLS, opening))
    text = chat.tokenizer.decode(np.concatenate(context).tolist())
    if calls or has_reasoning:
        whole = rendered(name, [QUESTION, said, *answer])
    else:  # at the very end some renderers put an empty block of reasoning before such a reply
        whole = rendered(name, [QUESTION, said, Message(Role.USER, "next")])
    # GLM's replies end with the beginning of the next turn, which a conversation that ends with them has not.
    text = text.removesuffix("<|user|>") if not answer else text
    assert text.startswith(whole) if answer else whole.startswith(text)


@settings(max_examples=25)
@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_reasoning_is_opened_and_closed_once_and_reads_back_as_it_was_meant(chats, name, data):
    chat = chats[name]
    calls = tuple(data.draw(st.lists(call, max_size=1)))
    content = "" if calls else data.draw(words)
    reasoning = data.draw(st.none() | words) if name not in WITHOUT_REASONING else None
    opening = chat.open([QUESTION], TOOLS)
    reply = chat.complete(Message(Role.ASSISTANT, content, calls, reasoning=reasoning))
    assert int(reply[-1]) in chat.stop_token_ids
    turn = chat.tokenizer.decode([*opening[-12:].tolist(), *reply.tolist()])
    marks = re.findall("</?think>", turn)
    assert marks in ([], ["<think>", "</think>"])
    assert len(marks) == 2 or (reasoning is None and name not in OPENS_REASONING)
    parsed = chat.parse(reply, TOOLS, "e/0.", opening)
    assert (parsed.content, parsed.tool_calls, parsed.reasoning) == (content, calls, reasoning)


@pytest.mark.parametrize("name", CLOSES_REASONING)
def test_without_thinking_the_empty_block_stands_in_the_prompt_alone(name):
    chat = build(name, enable_thinking=False)
    opening, reply = chat.open([QUESTION], TOOLS), chat.complete(Message(Role.ASSISTANT, "There is 1."))
    text = chat.tokenizer.decode([*opening.tolist(), *reply.tolist()])
    assert text.count("<think>") <= 1
    assert text.count("</think>") == 1
    assert chat.tokenizer.decode(reply.tolist()).strip().startswith("There is 1.")
    assert chat.parse(reply, TOOLS, "e/0.", opening).content == "There is 1."
    with pytest.raises(ConfigError, match=r"cannot say this message .* let it reason \(chat\.options\.enable_thinking"):
        chat.complete(Message(Role.ASSISTANT, "There is 1.", reasoning="One?"))


@settings(max_examples=20)
@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_markers_in_a_conversation_are_text_in_every_format(chats, name, data):
    chat = chats[name]
    marker = data.draw(forged)
    number = chat.tokenizer.convert_tokens_to_ids(marker)
    assume(number is not None)
    called = Message(Role.ASSISTANT, "", (ToolCall("e/0.0", "query", {"sql": "x"}),))
    talks = [
        [
            Message(Role.SYSTEM, f"a{m}"),
            Message(Role.USER, f"{m}b"),
            called,
            Message(Role.TOOL, m, tool_call_id="e/0.0"),
        ]
        for m in ("", marker)
    ]
    counts = [chat.open(talk, TOOLS).tolist().count(number) for talk in talks]
    assert counts[0] == counts[1]
    pieces = [chat.extend(chat.open(t[:2], TOOLS), chat.complete(called), t[3:], TOOLS, np.zeros(0)) for t in talks]
    assert pieces[0].tolist().count(number) == pieces[1].tolist().count(number)
