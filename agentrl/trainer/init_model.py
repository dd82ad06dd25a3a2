"""Makes the first weights of a policy: a small model of random weights, or one read from a GGUF file."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils.logging import disable_progress_bar

from agentrl.tokens.tokenizer import FastTokenizer
from agentrl.trainer.config import ModelShape
from agentrl.types.errors import ConfigError


def make_model(shape: ModelShape, folder: Path, seed: int) -> int:
    """Write a Qwen3-style model of random weights beside the tokenizer in `folder`; returns its parameters."""
    tokenizer = FastTokenizer.load(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.feed_forward_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.hidden_size // shape.heads,
        max_position_embeddings=shape.context_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        initializer_range=shape.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    model = Qwen3ForCausalLM(config)
    disable_progress_bar()
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def count_parameters(folder: Path) -> int:
    """Numbers in the weight files of a model folder."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            total += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return total


def convert_gguf(file: Path, folder: Path) -> int:
    """Write the model and tokenizer of a GGUF file as float32 safetensors; returns the number of parameters.

    Raises:
        ConfigError: the file is missing, or the package that reads it is.
    """
    if not file.is_file():
        raise ConfigError(f"no GGUF file at {file}")
    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # from_pretrained does the same, but only where accelerate is installed.
        read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except ImportError as error:
        raise ConfigError(f"{file} cannot be read: {error}; pip install gguf") from error
    model.load_state_dict(read["tensors"], strict=not model.config.tie_word_embeddings, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
