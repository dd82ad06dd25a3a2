"""The model that an engine serves: loading, the forward pass over slots, logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from agentrl.engine.attention import SLOT_ATTENTION, SlotBatch
from agentrl.engine.lora import NO_ADAPTER, ServedAdapters
from agentrl.engine.options import EngineOptions
from agentrl.engine.routing import RoutingRecorder, has_experts
from agentrl.engine.slots import KVCache
from agentrl.models.head import LogitScaling, OutputHead
from agentrl.models.support import decoder_layers, fixed_rotary_positions, read_config
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
        self.context_length = _context_length(config, options.context_length)
        self.vocab_size = self.network.get_output_embeddings().weight.shape[0]
        self.eos_token_ids = _eos_token_ids(self.network)
        self.cache = KVCache(options.max_running_requests, options.device, self.context_length)
        self._scaling = LogitScaling.of(config)
        self.lora = ServedAdapters(self.network)
        has_routing = has_experts(self.network)
        self.routing = RoutingRecorder(self.network, options.max_running_requests) if has_routing else None
        self._device = options.device
        self._make_cache(options.max_running_requests)

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
        row_tensor = torch.from_numpy(row_ids).to(self._device)
        batch = SlotBatch(
            cache=self.cache,
            rows=rows if isinstance(rows, slice) else row_tensor,
            row_ids=row_tensor,
            positions=positions,
            length=length,
        )
        self.lora.select(adapters)
        output = self.network.base_model(
            input_ids=torch.from_numpy(ids).to(self._device),
            # Idle rows and padding stand beyond any context; some rotary bases look at the largest position.
            position_ids=positions.clamp(max=self.context_length - 1),
            use_cache=False,
            slot_batch=batch,
        )
        if self.routing is not None:
            self.routing.store(row_tensor, positions, self.cache.capacity)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the vocabulary of hidden states [..., H], at least in float32."""
        return OutputHead.of(self.network, self._scaling).logits(hidden)

    def _make_cache(self, num_slots: int) -> None:
        """A pass over one token shows what each layer keeps of it.

        Raises:
            ConfigError: a layer keeps nothing, since it mixes tokens by other means than attention, or the process may
                not have so many addresses.
        """
        one = np.zeros(1, np.int64)
        try:
            self.forward(slice(0, 1), one[:, None], one, np.full(1, NO_ADAPTER))
        except OSError as error:
            raise ConfigError(
                f"no addresses for the KV of {num_slots} requests of {self.context_length} tokens: {error}; "
                "raise the limit (ulimit -v), or lower context_length or max_running_requests"
            ) from error
        num_layers = len(decoder_layers(self.network))
        if missing := sorted(set(range(num_layers)) - self.cache.keys.keys()):
            raise ConfigError(
                f"{len(missing)} of {num_layers} layers of {type(self.network).__name__} "
                f"({self.network.config.model_type}), such as layer {missing[0]}, have no attention whose keys could "
                "be kept"
            )


def load_network(model: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A causal language model from a folder. Raises ConfigError if it is none."""
    read_config(model)
    disable_progress_bar()
    # torch's grouped matrix product, which transformers takes for experts, knows no float64.
    experts = {"experts_implementation": "eager"} if dtype is torch.float64 else {}
    try:
        network: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation=SLOT_ATTENTION, local_files_only=True, **experts
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model {model} cannot be loaded: {error}") from error
    # transformers annotates its `to` as if it took no device.
    as_module: torch.nn.Module = network
    as_module.to(device).eval().requires_grad_(False)
    return network


def _context_length(config: PreTrainedConfig, wanted: int | None) -> int:
    """Tokens of the longest context. Raises ConfigError where the model would change within one."""
    limit: int = min(config.max_position_embeddings, fixed_rotary_positions(config) or config.max_position_embeddings)
    if wanted is not None and limit < min(wanted, config.max_position_embeddings):
        raise ConfigError(
            f"context_length is {wanted}, but the rotary frequencies of this {config.model_type} change at {limit} "
            f"tokens, for all tokens of a longer context; give --context-length {limit} or less"
        )
    return min(wanted or limit, limit)


def _eos_token_ids(network: PreTrainedModel) -> frozenset[int]:
    eos = network.generation_config.eos_token_id if network.can_generate() else None
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
