from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
from folders import plain_messages, plain_tools
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from agentrl.tokens.chat import ChatFormat
from agentrl.tokens.config import ChatConfig
from agentrl.tokens.made_templates import made_template
from agentrl.tokens.train_tokenizer import make_tokenizer, save_tokenizer
from agentrl.types.message import Message, Role, ToolCall, ToolSpec

CHATML = "agentrl.tokens.chatml:ChatMLToolRenderer"
CONFIGS = {
    "qwen3": ChatConfig(renderer="qwen3"),
    "auto": ChatConfig(),
    "chatml": ChatConfig(renderer=CHATML),
    "chatml with a system message": ChatConfig(renderer=CHATML, options={"system": 'Be "good".\n'}),
}
TOOLS = (
    ToolSpec("query", "Runs 'one' \"statement\": <b>.", {"type": "object", "properties": {"sql": {"type": "string"}}}),
    ToolSpec("schema", "Looks é."),
)
plain = st.text(string.ascii_letters + string.digits + " .,_()'\"\n{}&<é", max_size=30)
words = plain.map(lambda text: text.strip() or "x")
arguments = st.dictionaries(
    st.sampled_from(["sql", "n"]), st.one_of(words, st.integers(-9, 9), st.none(), st.booleans())
)


@pytest.fixture(scope="module", params=CONFIGS)
def made(request, tmp_path_factory) -> tuple[ChatFormat, object]:
    """The format that agentrl speaks to a model it made, and what transformers makes of the same folder."""
    folder = tmp_path_factory.mktemp("made")
    config = CONFIGS[request.param]
    save_tokenizer(make_tokenizer(["select max from where"] * 4, ["net"], [], 400), folder, made_template(config))
    return ChatFormat.load(folder, config), AutoTokenizer.from_pretrained(folder)


@st.composite
def talks(draw) -> list[Message]:
    """Conversations in the order that there is: questions, calls with their results, answers, reasoning anywhere."""
    messages = [Message(Role.SYSTEM, draw(words))] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 3))):
        messages.append(Message(Role.USER, draw(words)))
        for step in range(draw(st.integers(0, 2))):
            names = [f"e/{turn}.{step}.{n}" for n in range(draw(st.integers(1, 2)))]
            calls = tuple(ToolCall(name, draw(st.sampled_from(["query", "schema"])), draw(arguments)) for name in names)
            messages.append(
                Message(Role.ASSISTANT, draw(st.just("") | words), calls, reasoning=draw(st.none() | words))
            )
            messages += [Message(Role.TOOL, draw(plain), tool_call_id=name) for name in names]
        messages.append(Message(Role.ASSISTANT, draw(words), reasoning=draw(st.none() | words)))
    end = draw(st.integers(1 + (messages[0].role is Role.SYSTEM), len(messages)))
    return messages[:end]


@settings(max_examples=60)
@given(talk=talks(), has_tools=st.booleans())
def test_others_make_the_same_tokens_of_a_made_models_folder(made, talk, has_tools):
    chat, theirs = made
    tools = TOOLS if has_tools else ()
    expected = theirs.apply_chat_template(
        plain_messages(talk), tools=plain_tools(tools) or None, add_generation_prompt=True, return_dict=False
    )
    assert chat.open(talk, tools).tolist() == expected


def test_the_whole_tool_text_is_one_token_for_others_as_well(tmp_path):
    first = made_folder(tmp_path / "first", [])
    text = first.tokenizer.decode(first.open([Message(Role.USER, "x")], TOOLS).tolist())
    fixed = text.partition("<|im_start|>")[2].partition("<|im_end|>")[0]
    assert '{"type": "function", "function": {"name": "query"' in fixed
    chat = made_folder(tmp_path / "second", [fixed])
    ids = chat.open([Message(Role.USER, "x")], TOOLS).tolist()
    assert ids[1] == chat.tokenizer.convert_tokens_to_ids(fixed)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "second")
    asked = [{"role": "user", "content": "x"}]
    expected = theirs.apply_chat_template(
        asked, tools=plain_tools(TOOLS), add_generation_prompt=True, return_dict=False
    )
    assert ids == expected


def made_folder(folder: Path, fixed_texts: list[str]) -> ChatFormat:
    save_tokenizer(make_tokenizer(["select max"] * 4, ["net"], fixed_texts, 400), folder)
    return ChatFormat.load(folder, CONFIGS["auto"])


def test_a_format_that_is_not_ours_makes_no_template(tmp_path):
    config = ChatConfig(renderer="llama-3")
    assert made_template(config) is None
    save_tokenizer(make_tokenizer([], [], [], 300), tmp_path, made_template(config))
    assert not (tmp_path / "chat_template.jinja").exists()
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
