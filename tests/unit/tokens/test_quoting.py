from __future__ import annotations

import pytest
from folders import MISTRAL_TOKENS, QWEN_MARKERS, QWEN_TOKENS, byte_level, sentence_piece, unicode_normal
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from agentrl.tokens.quoting import QUOTE, Quoting, is_marker, unquote
from agentrl.tokens.tokenizer import FastTokenizer

KINDS = {
    "byte-level": (byte_level, QWEN_TOKENS),
    "with a normalizer": (unicode_normal, QWEN_TOKENS),
    "sentence-piece": (sentence_piece, (*MISTRAL_TOKENS, *QWEN_MARKERS)),
}
ordinary = st.text(st.characters(codec="utf-8", exclude_characters="<>[]|" + QUOTE), max_size=30)


@pytest.fixture(scope="module", params=KINDS)
def pair(request) -> tuple[FastTokenizer, Tokenizer, tuple[str, ...]]:
    """A tokenizer, the same one made without any control tokens, and these."""
    make, added = KINDS[request.param]
    return FastTokenizer(make(added), "tiny"), make(()), added


def foreign(added: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Text with control tokens in it, whole, cut off and inside of one another."""
    tokens = st.sampled_from(added)
    nested = st.tuples(tokens, tokens).map(lambda two: two[0][:2] + two[1] + two[0][2:])
    return st.lists(st.one_of(ordinary, tokens, nested, st.sampled_from(["<", "<|", "|>", " ", "\n"]))).map("".join)


@settings(max_examples=150)
@given(data=st.data())
def test_ordinary_text_is_encoded_as_by_the_plain_tokenizer(pair, data):
    tokenizer, plain, _ = pair
    text = data.draw(ordinary)
    assert tokenizer.quoting.quote(text) == text
    assert tokenizer.encode(text) == plain.encode(text, add_special_tokens=False).ids


@settings(max_examples=150)
@given(data=st.data())
def test_quoted_text_is_encoded_as_by_a_tokenizer_that_knows_no_control_tokens(pair, data):
    tokenizer, plain, added = pair
    text = data.draw(foreign(added))
    ids = tokenizer.encode(tokenizer.quoting.quote(text))
    assert ids == plain.encode(text, add_special_tokens=False).ids
    assert not set(ids) & set(tokenizer.convert_tokens_to_ids(list(added)))


@settings(max_examples=150)
@given(data=st.data())
def test_control_tokens_around_quoted_text_are_meant(pair, data):
    tokenizer, _, added = pair
    first, last = data.draw(st.sampled_from(added)), data.draw(st.sampled_from(added))
    text = data.draw(foreign(added))
    ids = tokenizer.encode(f"{first}{tokenizer.quoting.quote(text)}{last}")
    control = set(tokenizer.convert_tokens_to_ids(list(added)))
    assert [ids[0], ids[-1]] == tokenizer.convert_tokens_to_ids([first, last])
    assert not set(ids[1:-1]) & control


@given(text=ordinary.filter(bool))
def test_quoting_something_elsewhere_changes_nothing_about_ordinary_text(pair, text):
    tokenizer, _, added = pair
    marker = tokenizer.quoting.quote("<think>")
    assert marker != "<think>"
    plainly, beside = (
        tokenizer.encode(f"{added[1]}{text}{added[2]}"),
        tokenizer.encode(f"{added[1]}{text}{added[2]}{marker}"),
    )
    assert beside[: len(plainly)] == plainly


@given(st.text(st.sampled_from("<think>a " + QUOTE)))
def test_what_is_quoted_comes_back_as_it_was(text):
    quoted = Quoting(["<think>", "</think>"]).quote(text)
    assert unquote(quoted) == text
    assert "<think>" not in quoted


def test_text_that_has_the_quoting_character_keeps_it_and_forges_nothing():
    tokenizer = FastTokenizer(byte_level(QWEN_TOKENS), "tiny")
    for text in (f"a{QUOTE}b", f"<{QUOTE}think>", f"<{QUOTE}{QUOTE}think>{QUOTE}"):
        ids = tokenizer.encode(f"<think>{tokenizer.quoting.quote(text)}<think>")
        assert tokenizer.decode(ids) == f"<think>{text}<think>"
        assert ids.count(tokenizer.convert_tokens_to_ids("<think>")) == 2


@pytest.mark.parametrize("text", ["<think>", "<arg_key>", "[TOOL_CALLS]", "<tool_response>", "</think>", "◁think▷"])
def test_tags_are_markers(text):
    assert is_marker(text)


@pytest.mark.parametrize(
    "text", ["    ", "\n\n", "<h1>", "</strong>", "<br/>", "word", "a long <text> of several words"]
)
def test_runs_of_spaces_html_and_words_are_ordinary_text(text):
    assert not is_marker(text)


def test_added_tokens_that_are_ordinary_text_stay_one_token_where_text_is_quoted():
    plain = byte_level(("<think>", "<|im_end|>"))
    plain.add_tokens([AddedToken("      ", normalized=False), AddedToken("<h1>", normalized=False)])
    tokenizer = FastTokenizer(plain, "tiny")
    ids = tokenizer.encode(tokenizer.quoting.quote("x      y<h1><think>"))
    assert set(tokenizer.convert_tokens_to_ids(["      ", "<h1>"])) <= set(ids)
    assert tokenizer.convert_tokens_to_ids("<think>") not in ids
