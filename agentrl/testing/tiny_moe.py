"""A tiny mixture-of-experts model with a tokenizer, made on the spot in a second."""

from __future__ import annotations

from pathlib import Path

from agentrl.tokens.making import make_tokenizer, save_tokenizer
from agentrl.trainer.config import ModelShape


def make_tiny_moe_model(folder: Path, seed: int = 0, context_tokens: int = 4096) -> Path:
    """Write a Qwen3-MoE model of random float32 weights with a byte-level tokenizer; returns the folder.

    2 layers of 8 experts, of which each token uses 2 with weights that add up to 1. `TINY_CHAT` is its chat
    format.
    """
    from agentrl.trainer.making import make_expert_model

    shape = ModelShape(
        hidden_size=64, layers=2, heads=4, feed_forward_size=64, context_tokens=context_tokens, vocabulary_tokens=400
    )
    words = "select from where count name schema query user assistant system what is the".split()
    save_tokenizer(make_tokenizer([" ".join(words)] * 4, words, [], shape.vocabulary_tokens), folder)
    make_expert_model(shape, folder, seed, experts=8, chosen=2)
    return folder
