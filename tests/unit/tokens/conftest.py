from __future__ import annotations

import pytest

from agentrl.tokens.chat import ChatFormat
from agentrl.tokens.config import ChatConfig
from agentrl.tokens.tokenizer import FastTokenizer
from agentrl.tokens.train_tokenizer import make_tokenizer

WORDS = ("net", "_cost", "ada", "uma", "17", "93")


@pytest.fixture(scope="session")
def tokenizer() -> FastTokenizer:
    corpus = ["select max from where query schema name count user assistant system"] * 4
    return FastTokenizer(make_tokenizer(corpus, WORDS, [], 400), "tiny")


@pytest.fixture(scope="session", params=["qwen3", "agentrl.tokens.chatml:ChatMLToolRenderer"])
def chat(request) -> ChatFormat:
    corpus = ["select max from where query schema name count user assistant system"] * 4
    tokenizer = FastTokenizer(make_tokenizer(corpus, WORDS, [], 400), "tiny")
    return ChatFormat.build(tokenizer, ChatConfig(renderer=request.param))
