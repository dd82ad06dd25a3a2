from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.tokens.tokenizer import FastTokenizer
from agentrl.tokens.train_tokenizer import CONTROL_TOKENS, MARKER_TOKENS, make_tokenizer, save_tokenizer
from agentrl.types.errors import ConfigError

FIXED = "this text, with 2 numbers and names like net_cost, stands in every prompt"


@given(st.text(max_size=60))
def test_what_is_encoded_decodes_to_the_same_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["net", "_cost", "ada", "uma", "17"])
def test_a_made_tokenizer_keeps_the_environments_words_whole(tokenizer, text):
    [token] = tokenizer.encode(text)
    assert tokenizer.decode(token) == text


def test_a_word_has_one_spelling_in_tokens_wherever_it_stands(tokenizer):
    [net], [cost], [ada] = (tokenizer.encode(text) for text in ("net", "_cost", "ada"))
    for text in ("max(net_cost)", " net_cost,", "ada's net_cost", "\nnet_cost"):
        ids = tokenizer.encode(text)
        place = ids.index(net)
        assert ids[place : place + 2] == [net, cost]
    assert tokenizer.encode("'ada'")[1] == tokenizer.encode(" ada")[1] == ada


def test_fixed_text_is_one_token_and_text_around_it_is_not_touched():
    tokenizer = FastTokenizer(make_tokenizer(["select"] * 4, ["net"], [FIXED], 400), "tiny")
    before, fixed, after = tokenizer.encode("net"), tokenizer.encode(FIXED), tokenizer.encode("17")
    assert len(fixed) == 1
    assert tokenizer.encode(f"net{FIXED}17") == [*before, *fixed, *after]


def test_a_made_tokenizer_has_at_most_the_size_that_was_asked_for():
    corpus = ["every word of this text is another one than those before it"] * 50
    tokenizer = FastTokenizer(make_tokenizer(corpus, ["net"], [FIXED], 300), "tiny")
    assert tokenizer.vocab_size <= 300
    ids = tokenizer.convert_tokens_to_ids([*CONTROL_TOKENS, *MARKER_TOKENS])
    assert None not in ids
    assert max(ids) < 300


def test_control_tokens_that_are_quoted_are_text_and_others_are_meant(tokenizer):
    start, end = tokenizer.convert_tokens_to_ids(["<think>", "<|im_end|>"])
    assert tokenizer.encode("a<|im_end|>b")[1] == end
    mixed = tokenizer.encode("<think>" + tokenizer.quoting.quote("a<|im_end|>b<think>") + "<|im_end|>")
    assert (mixed[0], mixed[-1], mixed.count(start), mixed.count(end)) == (start, end, 1, 1)
    assert tokenizer.decode(mixed) == "<think>a<|im_end|>b<think><|im_end|>"


def test_cached_encodings_are_not_shared_with_callers(tokenizer):
    tokenizer.encode("select").append(-1)
    assert -1 not in tokenizer.encode("select")


def test_a_saved_tokenizer_reads_back_alike(tokenizer, tmp_path):
    made = make_tokenizer(["select max"] * 4, ["net"], [FIXED], 400)
    save_tokenizer(made, tmp_path / "model")
    loaded = FastTokenizer.load(tmp_path / "model")
    assert loaded.encode(f"net{FIXED}max") == made.encode(f"net{FIXED}max").ids
    assert loaded.eos_token_id == loaded.convert_tokens_to_ids("<|im_end|>")


def test_a_folder_without_a_tokenizer_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in model folder .*; save the tokenizer beside"):
        FastTokenizer.load(tmp_path)


def test_unknown_tokens_have_no_id(tokenizer):
    assert tokenizer.convert_tokens_to_ids("<|never|>") is None
