"""Tiny configurations of the architectures that agentrl knows, with windows and caps that act within 40 tokens."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

WINDOW = 9
_SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_WINDOWED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": _LAYERS}
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GROUPED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}

# Model type and what differs from `_SHAPE`, by a name of the case.
SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, **_WINDOWED}),
    "qwen3": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3_window": ("qwen3", {"use_sliding_window": True, "head_dim": 16, **_WINDOWED}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": WINDOW}),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}
        | _WINDOWED,
    ),
    "gemma3_text": ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16} | _WINDOWED),
    "gpt_oss": ("gpt_oss", {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2} | _WINDOWED),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "granite": (
        "granite",
        {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3},
    ),
    "cohere": ("cohere", {"logit_scale": 0.4, "use_qk_norm": True}),
    "cohere2": ("cohere2", {"logit_scale": 0.4, **_WINDOWED}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _WINDOWED),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 16, **_EXPERTS}),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "router_jitter_noise": 0.5}),
    "deepseek_v3": ("deepseek_v3", _LATENT | _GROUPED),
    "glm4_moe": ("glm4_moe", {"head_dim": 16, "use_qk_norm": True, **_GROUPED}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
}
# The same for models that are refused.
REFUSED: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "head_dim": 16,
        **_EXPERTS,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "head_dim": 8},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "llama4_text": {"num_local_experts": 2},
    "t5": {},
    "qwen2_5_vl": {},
}


def tiny_config(name: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a case of `SUPPORTED` or `REFUSED`, with other values where they are given."""
    model_type, values = SUPPORTED[name] if name in SUPPORTED else (name, REFUSED[name])
    return AutoConfig.for_model(model_type, **(_SHAPE | values | changes))
