"""A tiny mixture of experts with a tokenizer, made on the spot in a second."""

from __future__ import annotations

from pathlib import Path

from agentrl.testing.tiny import save_tiny_tokenizer
from agentrl.tokens.tokenizer import FastTokenizer

NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 8, 2


def make_tiny_moe_model(folder: Path, seed: int = 0, context_tokens: int = 4096, is_tied: bool = False) -> Path:
    """Write a Qwen3-MoE-style model of random float32 weights with the tiny tokenizer; returns the folder.

    Two layers of eight experts, two of them per token; weights wide enough that the routing of tokens differs.
    The output head is not tied to the embeddings by default, since SGLang's Qwen3-MoE leaves a tied one uninitialised.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils.logging import disable_progress_bar

    save_tiny_tokenizer(folder)
    tokenizer = FastTokenizer.load(folder)
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=context_tokens,
        initializer_range=0.08,
        tie_word_embeddings=is_tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    config.update({"head_dim": 16})  # the models know it, their class does not name it
    disable_progress_bar()
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder
