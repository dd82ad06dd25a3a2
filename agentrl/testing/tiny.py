"""Tiny models with tokenizers, made on the spot in a second."""

from __future__ import annotations

from pathlib import Path

from agentrl.tokens.chat import ChatFormat
from agentrl.tokens.config import ChatConfig
from agentrl.tokens.train_tokenizer import make_tokenizer, save_tokenizer
from agentrl.trainer.config import ModelShape

TINY_CHAT = ChatConfig(renderer="qwen3")
TINY_SHAPE = ModelShape(
    hidden_size=32, layers=2, heads=2, feed_forward_size=64, context_tokens=512, vocabulary_tokens=400
)


def make_tiny_model(folder: Path, seed: int = 0, shape: ModelShape = TINY_SHAPE) -> Path:
    """Write a Qwen3-style model of random weights with a byte-level tokenizer; returns the folder.

    It speaks nonsense in Qwen3's chat format; `TINY_CHAT` says so to a `ChatFormat`.
    """
    from agentrl.trainer.init_model import make_model

    save_tiny_tokenizer(folder, shape.vocabulary_tokens)
    make_model(shape, folder, seed)
    return folder


def save_tiny_tokenizer(folder: Path, vocabulary_tokens: int = TINY_SHAPE.vocabulary_tokens) -> None:
    """Write the byte-level tokenizer of a tiny model into its folder."""
    words = "select from where count name schema query user assistant system what is the".split()
    save_tokenizer(make_tokenizer([" ".join(words)] * 4, words, [], vocabulary_tokens), folder)


def tiny_chat(folder: Path) -> ChatFormat:
    """The chat format of a tiny model."""
    return ChatFormat.load(folder, TINY_CHAT)
