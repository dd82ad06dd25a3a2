"""The model that an engine serves: loading, the forward pass over slots, logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from agentrl.engine.attention import SLOT_ATTENTION, SlotBatch
from agentrl.engine.lora import LoraStack
from agentrl.engine.options import EngineOptions
from agentrl.engine.routing import RoutingRecorder, has_experts
from agentrl.engine.slots import KVCache
from agentrl.types.errors import ConfigError


class ServedModel:
    """A causal language model with a KV cache of slots.

    Example: ``forward([0], [[5, 6, 7]], [0], [0])`` gives the hidden states of three tokens put at the start
    of slot 0, computed without an adapter.
    """

    def __init__(self, options: EngineOptions) -> None:
        dtype = torch.float64 if options.deterministic else getattr(torch, options.dtype)
        self.network = load_network(options.model, dtype, options.device)
        config = self.network.config
        limit = config.max_position_embeddings
        self.context_length = min(options.context_length or limit, limit)
        self.vocab_size = self.network.get_output_embeddings().weight.shape[0]
        self.eos_token_ids = _eos_token_ids(self.network)
        self.cache = _make_cache(config, options, dtype, self.context_length)
        self.lora = LoraStack(self.network)
        has_routing = has_experts(self.network)
        self.routing = RoutingRecorder(self.network, options.max_running_requests) if has_routing else None
        self._device = options.device

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Let one slot begin with the first tokens of another."""
        self.cache.copy_prefix(source, target, num_tokens)
        if self.routing is not None:
            self.routing.copy_prefix(source, target, num_tokens)

    @torch.no_grad()
    def forward(
        self, rows: slice | np.ndarray, ids: np.ndarray, starts: np.ndarray, adapters: np.ndarray
    ) -> torch.Tensor:
        """Hidden states [B, T, H] of ids [B, T] put into slots `rows` from columns `starts` on, by `adapters` [B]."""
        num_tokens = ids.shape[1]
        positions = torch.from_numpy(starts[:, None] + np.arange(num_tokens)).to(self._device)
        length = int(starts.max()) + num_tokens
        row_ids = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        self.cache.reserve(length, 1 + int(row_ids.max()))
        columns = torch.arange(length, device=self._device)
        row_tensor = torch.from_numpy(row_ids).to(self._device)
        batch = SlotBatch(
            cache=self.cache,
            rows=rows if isinstance(rows, slice) else row_tensor,
            row_ids=row_tensor,
            positions=positions,
            visible=(columns <= positions[:, :, None])[:, None],
        )
        self.lora.select(adapters)
        output = self.network.base_model(
            input_ids=torch.from_numpy(ids).to(self._device),
            position_ids=positions,
            use_cache=False,
            slot_batch=batch,
        )
        if self.routing is not None:
            self.routing.store(row_tensor, positions, self.cache.capacity)
        return output.last_hidden_state

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the vocabulary of hidden states [..., H], at least in float32."""
        logits = self.network.get_output_embeddings()(hidden)
        return logits if logits.dtype is torch.float64 else logits.float()


def _make_cache(config: PreTrainedConfig, options: EngineOptions, dtype: torch.dtype, context_length: int) -> KVCache:
    """Raises ConfigError if the process may not have so many addresses."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (config.num_hidden_layers, options.max_running_requests, config.num_key_value_heads, head_dim)
    try:
        return KVCache(*shape, dtype, options.device, context_length)
    except OSError as error:
        raise ConfigError(
            f"no addresses for the KV of {options.max_running_requests} requests of {context_length} tokens: {error}; "
            "raise the limit (ulimit -v), or lower context_length or max_running_requests"
        ) from error


def load_network(model: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A causal language model from a folder. Raises ConfigError if it is none."""
    if not (model / "config.json").is_file():
        raise ConfigError(f"no model at {model}: config.json is missing; give a folder made by save_pretrained")
    disable_progress_bar()
    # torch's grouped matrix product, which transformers takes for experts, knows no float64.
    experts = {"experts_implementation": "eager"} if dtype is torch.float64 else {}
    try:
        network = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation=SLOT_ATTENTION, local_files_only=True, **experts
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {model} cannot be loaded: {error}") from error
    return network.to(device).eval().requires_grad_(False)


def _eos_token_ids(network: PreTrainedModel) -> frozenset[int]:
    eos = network.generation_config.eos_token_id if network.generation_config else None
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
