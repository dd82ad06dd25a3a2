"""Architectures whose trainer and engine equal plain transformers in the test suite, and some that are refused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """One type of models, as ``config.json`` calls it (`model_type`), and which of its features were compared."""

    model_type: str
    name: str
    features: str


@dataclass(frozen=True, slots=True)
class Refused:
    """One type of models that is refused before a run, and why."""

    model_type: str
    name: str
    reason: str


# Held against float64 forwards of transformers in tests/unit/models, every parameter drawn at random.
VERIFIED = (
    Architecture("llama", "Llama", "biases of attention and feed-forward layers"),
    Architecture("qwen2", "Qwen2, Qwen2.5", "sliding windows by layer"),
    Architecture("qwen3", "Qwen3", "sliding windows by layer"),
    Architecture("qwen3_moe", "Qwen3-MoE", "experts, with routing replay"),
    Architecture("mistral", "Mistral", "with and without a sliding window"),
    Architecture("mixtral", "Mixtral", "experts; router noise is off"),
    Architecture("gemma2", "Gemma 2", "sliding windows by layer, soft caps of scores and logits"),
    Architecture("gemma3_text", "Gemma 3 (text)", "sliding windows by layer, two rotary bases"),
    Architecture("gpt_oss", "GPT-OSS", "sliding windows by layer, attention sinks, experts with biases, YaRN"),
    Architecture("phi", "Phi-1, Phi-2", "bias of the output head, partial rotary embedding; dropout is off"),
    Architecture("phi3", "Phi-3, Phi-4", "sliding window; longrope up to the original context"),
    Architecture("granite", "Granite", "multipliers, scaled logits"),
    Architecture("cohere", "Command R", "scaled logits, parallel layers"),
    Architecture("cohere2", "Command R7B, Command A", "sliding windows by layer, scaled logits"),
    Architecture("olmo2", "OLMo 2", "norms behind the layers"),
    Architecture("olmo3", "OLMo 3", "sliding windows by layer"),
    Architecture("olmoe", "OLMoE", "experts, with routing replay"),
    Architecture("deepseek_v3", "DeepSeek-V3, -R1", "latent attention, groups of experts"),
    Architecture("glm4_moe", "GLM-4.5, GLM-4.6", "groups of experts"),
    Architecture("smollm3", "SmolLM3", "layers without positions"),
)
REFUSED = (
    Refused("qwen3_next", "Qwen3-Next", "linear attention"),
    Refused("mamba2", "Mamba 2", "recurrent layers"),
    Refused("falcon_h1", "Falcon-H1", "recurrent layers"),
    Refused("opt", "OPT", "layers of an older kind"),
    Refused("bloom", "Bloom", "layers of an older kind"),
    Refused("llama4_text", "Llama 4", "chunked attention"),
    Refused("t5", "T5 and other encoder-decoders", "an encoder"),
    Refused("qwen2_5_vl", "Qwen2.5-VL, Gemma 3 with images and other multimodal models", "parts beside the text model"),
)


def markdown_table() -> str:
    """Both lists as a table for the README."""
    rows = [f"| {a.name} | `{a.model_type}` | verified: {a.features} |" for a in VERIFIED]
    rows += [f"| {r.name} | `{r.model_type}` | refused: {r.reason} |" for r in REFUSED]
    return "\n".join(["| Models | `model_type` | |", "|---|---|---|", *rows])
