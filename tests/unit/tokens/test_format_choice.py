from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import templates
from folders import (
    ANSWER,
    CALL,
    CHATML_TOKENS,
    GLM_TOKENS,
    NEXT,
    QUESTION,
    QWEN_TOKENS,
    RESULT,
    SYSTEM,
    TOOLS,
    as_transformers_does,
    byte_level,
    write_folder,
)

from agentrl.tokens.chat import ChatFormat
from agentrl.tokens.config import ChatConfig
from agentrl.tokens.made_templates import QWEN3_TEMPLATE
from agentrl.types.errors import ConfigError

AUTO = ChatConfig()
CHATML = "agentrl.tokens.chatml:ChatMLToolRenderer"


def qwen(folder: Path, template: str | None, tokens: tuple[str, ...] = QWEN_TOKENS) -> Path:
    return write_folder(folder, byte_level(tokens), template, "<|im_end|>")


def test_a_hand_written_renderer_is_taken_where_it_says_what_the_folders_template_says(tmp_path):
    chat = ChatFormat.load(qwen(tmp_path / "anything", QWEN3_TEMPLATE), AUTO)
    assert chat.source == "renderer 'qwen3': it gives what the template in tokenizer_config.json gives"


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen/Qwen3-0.6B"])
def test_the_name_of_a_folder_decides_nothing(tmp_path, name):
    folder = qwen(tmp_path / name, templates.HERMES)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"name_or_path": "Qwen/Qwen3-0.6B"}))
    chat = ChatFormat.load(folder, AUTO)
    assert chat.source == "the model's own template in tokenizer_config.json"
    assert chat.open([QUESTION], TOOLS).tolist() == as_transformers_does(folder, [QUESTION], TOOLS)


def test_a_template_that_differs_in_one_character_is_not_taken_for_another(tmp_path):
    other = QWEN3_TEMPLATE.replace("For each function call, return", "For every function call, return")
    assert other != QWEN3_TEMPLATE
    chat = ChatFormat.load(qwen(tmp_path, other), AUTO)
    assert chat.source.startswith("the model's own template")


def test_the_template_beside_the_tokenizer_goes_before_the_one_in_its_settings(tmp_path):
    folder = qwen(tmp_path, templates.CHATML)
    (folder / "chat_template.jinja").write_text(QWEN3_TEMPLATE)
    assert ChatFormat.load(folder, AUTO).source.endswith("the template in chat_template.jinja gives")


def test_a_template_of_its_own_for_tools_is_used_where_there_are_tools(tmp_path):
    folder = qwen(tmp_path, None)
    file = folder / "tokenizer_config.json"
    named = [{"name": "default", "template": templates.CHATML}, {"name": "tool_use", "template": templates.HERMES}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": named}))
    chat = ChatFormat.load(folder, ChatConfig(renderer="template"))
    for tools in ((), TOOLS):
        assert chat.open([QUESTION], tools).tolist() == as_transformers_does(folder, [QUESTION], tools)


def test_a_chatml_model_whose_template_has_no_tools_gets_them_as_text(tmp_path):
    folder = qwen(tmp_path / "Qwen2-0.5B", templates.CHATML, CHATML_TOKENS)
    chat = ChatFormat.load(folder, AUTO)
    assert chat.source == "ChatML with tools as text: the template in tokenizer_config.json is ChatML without tools"
    for talk in ([QUESTION], [SYSTEM, QUESTION, ANSWER, NEXT]):
        assert chat.open(talk, ()).tolist() == as_transformers_does(folder, talk, ())
    opening, reply = chat.open([QUESTION], TOOLS), chat.complete(CALL)
    piece = chat.extend(opening, reply, [RESULT], TOOLS, opening)
    assert [*opening, *reply, *piece] == chat.open([QUESTION, CALL, RESULT], TOOLS).tolist()
    assert chat.parse(reply, TOOLS, "e/0.").tool_calls == CALL.tool_calls


def test_a_chatml_tokenizer_without_a_template_gets_tools_as_text(tmp_path):
    chat = ChatFormat.load(qwen(tmp_path, None, CHATML_TOKENS), AUTO)
    assert chat.source == "ChatML with tools as text: the folder has ChatML tokens and no chat template"


def test_a_folder_without_template_and_chatml_is_refused_with_a_remedy(tmp_path):
    folder = write_folder(tmp_path, byte_level(GLM_TOKENS), None, "<|endoftext|>")
    with pytest.raises(ConfigError, match=r"no chat template and no ChatML tokens; put the chat_template\.jinja"):
        ChatFormat.load(folder, AUTO)
    with pytest.raises(ConfigError, match=r"chat\.renderer 'template': .* has no chat template"):
        ChatFormat.load(folder, ChatConfig(renderer="template"))


BROKEN = [
    ("{% for message in %}", r"tokenizer_config\.json is not valid Jinja"),
    ("{{ raise_exception('never') }}", "refuses a single user message: never; choose chat.renderer"),
    ("{{ messages[0].content.no.such }}", "refuses a single user message"),
    ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "which token ends a reply; name it there as eos_token_id"),
]


@pytest.mark.parametrize(("template", "message"), BROKEN)
def test_a_template_that_cannot_be_used_is_refused_before_a_run(tmp_path, template, message):
    tokenizer = byte_level(GLM_TOKENS)
    folder = write_folder(tmp_path, tokenizer, template, "no such token")
    with pytest.raises(ConfigError, match=message):
        ChatFormat.load(folder, AUTO)


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path):
    folder = qwen(tmp_path / "a", templates.CHATML)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json cannot be read"):
        ChatFormat.load(folder, AUTO)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        ChatFormat.load(folder, AUTO)


def test_what_a_template_cannot_carry_is_said_with_what_to_choose(tmp_path, caplog):
    silent = templates.CHATML.replace("You are a helpful assistant.", "{{ 1 // 1 }}").replace("|im_start|", "|user|")
    folder = write_folder(tmp_path, byte_level(GLM_TOKENS), silent.replace("|im_end|", "|endoftext|"), "<|endoftext|>")
    chat = ChatFormat.load(folder, AUTO)
    assert not chat.abilities.has_tools
    chat.log_limits()
    assert "tools do not appear in the prompt, tool calls cannot be written or read back" in caplog.text
    with pytest.raises(
        ConfigError, match=r"for environments with tools choose another chat\.renderer: .* 'module:Class'"
    ):
        chat.open([QUESTION], TOOLS)
    assert len(chat.open([QUESTION], ()))


def test_a_reply_stops_at_every_token_that_template_or_settings_call_its_end(tmp_path):
    tokenizer = byte_level(QWEN_TOKENS)
    end, text_end = (tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>"))
    folder = write_folder(tmp_path, tokenizer, templates.HERMES, "<|endoftext|>", eos_token_id=[text_end])
    assert set(ChatFormat.load(folder, AUTO).stop_token_ids) == {end, text_end}


def test_a_template_that_rewrites_history_does_so_only_where_that_is_asked_for(tmp_path):
    folder = qwen(tmp_path, templates.HERMES)
    pieces = {}
    for history in ("exact", "template"):
        chat = ChatFormat.load(folder, ChatConfig(history=history))
        opening = chat.open([QUESTION], ())
        pieces[history] = chat.extend(opening, chat.complete(ANSWER), [NEXT], (), opening)
    assert pieces["exact"] is not None
    assert pieces["template"] is None


def test_a_folder_can_be_moved(tmp_path):
    folder = qwen(tmp_path / "here", QWEN3_TEMPLATE)
    before = ChatFormat.load(folder, AUTO).open([QUESTION], TOOLS)
    shutil.move(folder, tmp_path / "there")
    assert ChatFormat.load(tmp_path / "there", AUTO).open([QUESTION], TOOLS).tolist() == before.tolist()
