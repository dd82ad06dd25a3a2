from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from agentrl.engine.lora import NO_ADAPTER
from agentrl.engine.model import ServedModel
from agentrl.engine.options import EngineOptions
from agentrl.engine.peft import LoraAdapter, LoraPair
from agentrl.engine.routing import has_experts

IDS = [3, 14, 15, 92, 65, 35, 89, 79]
SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
DENSE_FIRST = Qwen2MoeConfig(**SHAPE, num_experts=6, moe_intermediate_size=16, mlp_only_layers=[0])
EVERY_LAYER = [
    MixtralConfig(**SHAPE, num_local_experts=6),
    OlmoeConfig(**SHAPE, num_experts=6),
    Qwen3MoeConfig(**SHAPE, num_experts=6, moe_intermediate_size=16, head_dim=8),
]


def _serve(config: PreTrainedConfig, folder: Path) -> tuple[ServedModel, list[np.ndarray]]:
    """A random model, and its routers' choices for `IDS` in a plain pass, one array for each layer of experts."""
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config).eval()
    network.save_pretrained(folder)
    return ServedModel(EngineOptions(model=folder, port=1, max_running_requests=2)), _chosen(network)


@torch.no_grad()
def _chosen(network: torch.nn.Module) -> list[np.ndarray]:
    routers = network(torch.tensor([IDS]), output_router_logits=True).router_logits
    return [logits.topk(2).indices.numpy() for logits in routers]


def _recorded(model: ServedModel, adapter: int = NO_ADAPTER) -> np.ndarray:
    assert model.routing is not None
    for start, end in ((0, 5), (5, len(IDS))):
        ids = np.asarray([IDS[start:end]])
        model.forward(np.asarray([1]), ids, np.asarray([start]), np.asarray([adapter]))
    return model.routing.read(1, len(IDS))


@pytest.mark.parametrize("config", EVERY_LAYER, ids=lambda config: config.model_type)
def test_families_that_route_differently_are_recorded_alike(config: PreTrainedConfig, tmp_path: Path) -> None:
    model, chosen = _serve(config, tmp_path)
    assert np.array_equal(_recorded(model), np.stack(chosen, axis=1))


def test_a_layer_without_experts_keeps_its_place(tmp_path: Path) -> None:
    model, chosen = _serve(DENSE_FIRST, tmp_path)
    recorded = _recorded(model)
    assert recorded.shape == (len(IDS), 3, 2)
    assert not recorded[:, 0].any()
    assert np.array_equal(recorded[:, 1:], np.stack(chosen, axis=1))


def test_the_experts_of_a_request_are_those_under_its_adapter(tmp_path: Path) -> None:
    model, chosen = _serve(EVERY_LAYER[-1], tmp_path)
    name = "model.layers.0.self_attn.o_proj"
    pair = LoraPair(torch.randn(2, 32), torch.randn(32, 2))
    model.lora.put(4, model.lora.fitted(LoraAdapter({name: pair})))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        merged.get_submodule(name).weight += pair.b_OR @ pair.a_RI
    assert np.array_equal(_recorded(model), np.stack(chosen, axis=1))
    under_adapter = _recorded(model, adapter=4)
    assert np.array_equal(under_adapter, np.stack(_chosen(merged), axis=1))
    assert not np.array_equal(under_adapter, np.stack(chosen, axis=1))


@pytest.mark.parametrize("config", [DeepseekV3Config, GptOssConfig], ids=lambda config: config.model_type)
def test_experts_are_found_where_the_layer_itself_routes(config: type[PreTrainedConfig]) -> None:
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config(num_hidden_layers=4))
    assert has_experts(network)
