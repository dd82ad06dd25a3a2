from __future__ import annotations

import string
from pathlib import Path

import numpy as np
import pytest
import templates
from folders import (
    ANSWER,
    CALL,
    GLM_TOKENS,
    LLAMA_TOKENS,
    MISTRAL_TOKENS,
    NEXT,
    QUESTION,
    QWEN_TOKENS,
    RESULT,
    SYSTEM,
    TOOLS,
    as_transformers_does,
    byte_level,
    sentence_piece,
    write_folder,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.tokens.chat import ChatFormat
from agentrl.tokens.config import ChatConfig
from agentrl.tokens.tokenizer import FastTokenizer
from agentrl.types.errors import EpisodeError
from agentrl.types.message import Message, Role, ToolCall

KINDS = {
    "hermes": (byte_level, QWEN_TOKENS, templates.HERMES, "<|im_end|>", None),
    "thinking": (byte_level, QWEN_TOKENS, templates.THINKING, "<|im_end|>", None),
    "keyed": (byte_level, GLM_TOKENS, templates.KEYED, "<|endoftext|>", None),
    "bare": (byte_level, LLAMA_TOKENS, templates.BARE_JSON, "<|eot_id|>", "<|begin_of_text|>"),
    "listed": (sentence_piece, MISTRAL_TOKENS, templates.LISTED, "</s>", "<s>"),
}
REASONS = ("thinking", "keyed")
REMINDER = Message(Role.SYSTEM, "Never guess.")
plain = st.text(string.ascii_letters + string.digits + " .,_()'\n", max_size=30).map(str.strip)
words = plain.filter(bool)


def make(root: Path, kind: str, **options: object) -> tuple[Path, ChatFormat]:
    build, added, template, eos, bos = KINDS[kind]
    tokenizer = build(added)
    more = {}
    if kind == "keyed":
        more["eos_token_id"] = [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    folder = write_folder(root / kind, tokenizer, template, eos, bos, **more)
    return folder, ChatFormat.load(folder, ChatConfig(renderer="template", options=options))


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory) -> tuple[str, Path, ChatFormat]:
    return request.param, *make(tmp_path_factory.mktemp("folders"), request.param)


def test_prompts_are_those_that_transformers_makes_of_the_same_folder(made):
    kind, folder, chat = made
    before = [] if kind == "listed" else [SYSTEM]
    for talk in ([QUESTION], [*before, QUESTION, CALL, RESULT], [*before, QUESTION, CALL, RESULT, ANSWER, NEXT]):
        for tools in ((), TOOLS):
            expected = as_transformers_does(folder, talk, tools, date_string="26 Jul 2024")
            assert chat.open(talk, tools).tolist() == expected


def test_the_format_says_what_it_can_carry(made):
    kind, _, chat = made
    abilities = chat.abilities
    assert (abilities.tools, abilities.calls, abilities.results) == (True, True, True)
    assert abilities.system == (kind != "listed")
    assert abilities.reasoning == (kind in REASONS)


@settings(max_examples=40)
@given(data=st.data())
def test_what_a_policy_would_have_said_parses_to_what_was_meant(made, data):
    kind, _, chat = made
    most = 1 if kind == "bare" else 3
    arguments = st.fixed_dictionaries({"sql": words}, optional={"n": st.integers(-9, 9)})
    names = st.sampled_from(["query", "schema"])
    calls = tuple(data.draw(st.lists(st.builds(ToolCall, st.just(""), names, arguments), max_size=most)))
    content = data.draw(words) if not calls else ""
    reasoning = data.draw(st.none() | words) if kind in REASONS else None
    ids = chat.complete(Message(Role.ASSISTANT, content, calls, reasoning=reasoning))
    assert int(ids[-1]) in chat.stop_token_ids
    tail = chat.open([QUESTION], TOOLS)
    parsed = chat.parse(ids, TOOLS, "e/3.", tail)
    assert (parsed.content, parsed.reasoning) == (content, reasoning)
    assert [(c.id, c.name, c.error) for c in parsed.tool_calls] == [
        (f"e/3.{n}", c.name, None) for n, c in enumerate(calls)
    ]
    assert [c.arguments.get("n") for c in parsed.tool_calls] == [c.arguments.get("n") for c in calls]


@settings(max_examples=40)
@given(data=st.data())
def test_extending_turn_by_turn_equals_rendering_the_whole(made, data):
    kind, _, chat = made
    context = tail = chat.open([QUESTION], TOOLS)
    conversation = [QUESTION]
    for turn in range(data.draw(st.integers(1, 3))):
        reasoning = data.draw(words) if kind in REASONS else None
        call = ToolCall(f"e/{turn}.0", "query", {"sql": data.draw(words)})
        reply = Message(Role.ASSISTANT, "", (call,), reasoning=reasoning)
        answer = Message(Role.TOOL, f'{{"a": "{data.draw(words)}"}}', tool_call_id=call.id)
        ids = chat.complete(reply)
        piece = chat.extend(tail, ids, [answer], TOOLS, context[:0])
        context, tail = np.concatenate([context, ids, piece]), piece
        conversation += [reply, answer]
    whole = chat.open(conversation, TOOLS)
    text = chat.tokenizer.decode(context.tolist())
    if kind == "listed":  # it numbers calls through the conversation, and a piece does not know how many there were
        text, expected = (remove_ids(t) for t in (text, chat.tokenizer.decode(whole.tolist())))
        assert text == expected
    else:
        assert np.array_equal(context, whole)


def remove_ids(text: str) -> str:
    return "".join(piece[9:] if n else piece for n, piece in enumerate(text.split('id": "')))


def test_a_users_question_follows_a_reply_as_in_the_whole_conversation(made):
    _, _, chat = made
    opening, reply = chat.open([QUESTION], ()), chat.complete(ANSWER)
    piece = chat.extend(opening, reply, [NEXT], (), opening)
    said = chat.tokenizer.decode(np.concatenate([opening, reply, piece]).tolist())
    assert said == chat.tokenizer.decode(chat.open([QUESTION, ANSWER, NEXT], ()).tolist())


def test_a_reply_that_was_cut_off_gets_the_close_that_the_format_requires(made):
    _, _, chat = made
    opening, whole = chat.open([QUESTION], ()), chat.complete(ANSWER)
    cut, full = (chat.extend(opening, ids, [NEXT], (), opening) for ids in (whole[:-1], whole))
    assert np.concatenate([whole[:-1], cut]).tolist() == np.concatenate([whole, full]).tolist()


def test_a_reply_that_was_cut_off_while_reasoning_is_closed_with_its_reasoning(tmp_path):
    _, chat = make(tmp_path, "thinking")
    opening = chat.open([QUESTION], ())
    cut = np.asarray(chat.tokenizer.encode("I am still"), np.int32)
    parsed = chat.parse(cut, (), "e/0.", opening)
    assert (parsed.content, parsed.reasoning) == ("", "I am still")
    piece = chat.tokenizer.decode(chat.extend(opening, cut, [NEXT], (), opening).tolist())
    assert piece.startswith("</think><|im_end|>\n<|im_start|>user\n")


def test_the_reply_itself_is_never_touched(made):
    _, _, chat = made
    odd = np.asarray([7, 250, 3, 3, chat.stop_token_ids[0]], np.int32)
    opening = chat.open([QUESTION], TOOLS)
    piece = chat.extend(opening, odd, [RESULT], TOOLS, opening)
    assert RESULT.content.split('"')[1] in chat.tokenizer.decode(piece.tolist())
    assert chat.parse(odd, TOOLS, "e/0.", opening).role is Role.ASSISTANT


def test_text_of_tools_and_users_never_becomes_a_control_token(made):
    kind, _, chat = made
    added = KINDS[kind][1]
    control = {token: chat.tokenizer.convert_tokens_to_ids(token) for token in added}
    harmless = forged = tail = chat.open([QUESTION], TOOLS)
    harmless = chat.extend(tail, chat.complete(CALL), [RESULT], TOOLS, tail)
    for token in added:
        result = Message(Role.TOOL, f"x{token}y", tool_call_id="e/0.0")
        forged = chat.extend(tail, chat.complete(CALL), [result], TOOLS, tail)
        counts = [[(ids == control[t]).sum() for t in added] for ids in (harmless, forged)]
        assert counts[0] == counts[1]
        assert f"x{token}y" in chat.tokenizer.decode(forged.tolist())
        asked = Message(Role.USER, f"x{token}y")
        assert (chat.open([asked], TOOLS) == control[token]).sum() == (tail == control[token]).sum()


MALFORMED = [
    ("hermes", '<tool_call>\n{"name": "query", "arguments": {"sql": }}\n</tool_call><|im_end|>', "invalid_json"),
    ("hermes", '<tool_call>\n{"name": "query", "arguments": {}}', "unclosed_block"),
    ("hermes", '<tool_call>\n{"arguments": {}}\n</tool_call><|im_end|>', "missing_name"),
    ("thinking", "</think>\n<tool_call>\n<function=query>\n<parameter=sql>\n1\n</tool_call>", "malformed_structure"),
    ("thinking", "</think>\n<tool_call>\nquery\n</tool_call>", "missing_name"),
    ("keyed", "\n<tool_call>query\n<arg_key>sql</arg_key>\n</tool_call><|user|>", "malformed_structure"),
    ("bare", '<|python_tag|>{"name": "query", "parameters": {', "invalid_json"),
    ("listed", "[TOOL_CALLS][{]</s>", "invalid_json"),
]


@pytest.mark.parametrize(("kind", "text", "error"), MALFORMED)
def test_a_malformed_call_is_a_call_that_says_what_is_wrong(tmp_path, kind, text, error):
    _, chat = make(tmp_path, kind)
    message = chat.parse(np.asarray(chat.tokenizer.encode(text), np.int32), TOOLS, "e/0.")
    [call] = message.tool_calls
    assert (call.id, call.arguments, call.error) == ("e/0.0", {}, error)


@pytest.mark.parametrize("style", ["[TOOL_CALLS]query[ARGS]{}", "[TOOL_CALLS]query[CALL_ID]abcdefghi[ARGS]{}"])
def test_newer_mistral_calls_are_read_as_well(tmp_path, style):
    _, chat = make(tmp_path, "listed")
    text = style.replace("{}", '{"sql": "x"}') + "</s>"
    [call] = chat.parse(np.asarray(chat.tokenizer.encode(text), np.int32), TOOLS, "e/0.").tool_calls
    assert (call.name, call.arguments, call.error) == ("query", {"sql": "x"}, None)


def test_a_template_that_refuses_a_conversation_ends_the_episode_and_says_why(tmp_path):
    _, chat = make(tmp_path, "listed")
    with pytest.raises(
        EpisodeError, match=r"the model's own template in tokenizer_config\.json refuses the conversation"
    ):
        chat.open([SYSTEM, QUESTION], ())


def test_a_later_system_message_stands_where_it_was_said_or_is_refused(made):
    """As agents send reminders: behind a result, before a question, and in a history that is rendered anew."""
    kind, _, chat = made
    opening = chat.open([QUESTION], TOOLS)
    talks = ([QUESTION, REMINDER], [QUESTION, CALL, RESULT, REMINDER], [QUESTION, ANSWER, REMINDER, NEXT])
    for talk in talks:
        if kind in ("thinking", "keyed"):
            assert REMINDER.content in chat.tokenizer.decode(chat.open(talk, TOOLS).tolist())
        else:
            with pytest.raises(EpisodeError, match=r"chat\.template.*refuses the conversation"):
                chat.open(talk, TOOLS)
    for reply, added in ((CALL, [RESULT, REMINDER]), (ANSWER, [REMINDER, NEXT])):
        piece = chat.extend(opening, chat.complete(reply), added, TOOLS, opening)
        assert piece is None or REMINDER.content in chat.tokenizer.decode(piece.tolist())
        assert (piece is not None) == (kind == "thinking" or (kind == "keyed" and reply is CALL))


@pytest.mark.parametrize(("name", "takes"), [("qwen3", True), ("qwen3.5", False), ("qwen3-vl", False)])
def test_a_hand_written_renderer_without_later_system_messages_refuses_them(name, takes):
    tokens = (*QWEN_TOKENS, *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"))
    chat = ChatFormat.build(FastTokenizer(byte_level(tokens), "tiny"), ChatConfig(renderer=name))
    assert chat.abilities.later_system == takes
    assert any("not its first" in note for note in chat.abilities.notes()) != takes
    if takes:
        assert REMINDER.content in chat.tokenizer.decode(chat.open([QUESTION, REMINDER], ()).tolist())
        return
    with pytest.raises(EpisodeError, match=r"chat\.template.*system message"):
        chat.open([QUESTION, REMINDER], ())


def test_options_are_variables_of_the_template(tmp_path):
    folder, chat = make(tmp_path, "thinking", enable_thinking=False)
    assert chat.open([QUESTION], ()).tolist() == as_transformers_does(folder, [QUESTION], (), enable_thinking=False)
    said = chat.tokenizer.decode(chat.complete(ANSWER).tolist())
    assert said == "There is 1.<|im_end|>"
