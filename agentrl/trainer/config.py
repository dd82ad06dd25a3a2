"""How a policy is trained: ranks, memory, optimizer, deadlines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.config.base import ConfigModel


class ModelShape(ConfigModel):
    """A small Qwen3-style model made on the spot."""

    hidden_size: Annotated[int, Field(gt=0)] = 128
    """Width of the residual stream."""
    layers: Annotated[int, Field(gt=0)] = 2
    """Transformer blocks."""
    heads: Annotated[int, Field(gt=0)] = 4
    """Attention heads; must divide hidden_size."""
    feed_forward_size: Annotated[int, Field(gt=0)] = 384
    """Width of the feed-forward layers."""
    context_tokens: Annotated[int, Field(gt=0)] = 512
    """Longest context."""
    vocabulary_tokens: Annotated[int, Field(gt=0)] = 900
    """Largest vocabulary; the environment's words come first."""
    rope_theta: Annotated[float, Field(gt=1)] = 10_000.0
    """Base of the rotary wavelengths; small for short contexts, where heads then find their neighbours sooner."""
    initializer_range: Annotated[float, Field(gt=0)] = 0.08
    """Standard deviation of the first weights; tiny models want more than the usual 0.02."""

    @model_validator(mode="after")
    def _heads_are_equal(self) -> ModelShape:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} is not {self.heads} heads of an even size: take a multiple of "
                f"{2 * self.heads}"
            )
        return self


class OptimizerConfig(ConfigModel):
    """The optimizer of a policy."""

    kind: Literal["adamw", "sgd", "muon"] = "adamw"
    """AdamW; SGD with momentum; or Muon on the matrices of the blocks and AdamW on the rest."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Step size; 1e-6 for RL of pretrained models with AdamW, far larger for tiny ones and for SGD."""
    rest_learning_rate: Annotated[float, Field(gt=0)] = 4e-3
    """Step size of AdamW beside Muon: embeddings, norms and biases."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD and Muon; first beta of AdamW."""
    second_beta: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Second beta of AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay: decoupled for AdamW and Muon, added to the gradient for SGD."""
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which all step sizes fall linearly to a tenth, where they stay; 0 keeps them. Set it to the steps of
    the run where few groups still have something to tell near its end: what is left to learn from is then mostly
    chance, and steps of full size follow it. Lessons of a warm start have a schedule of their own."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients of a larger norm are scaled down to it; counted as ``trainer/grad_norm``."""


class LoraConfig(ConfigModel):
    """Low-rank adapters: only they train and travel to the engines, the base model stays as it is."""

    rank: Annotated[int, Field(gt=0)] = 16
    """Inner size of each adapter; more for lessons further from the base, at most the engine's largest."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Adapters count alpha / rank times; change it together with rank to keep the learning rate's meaning."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Names of the linear layers of each block that get one; add gate_proj, up_proj and down_proj of dense
    models for about three times the parameters."""


class TrainerDeadlines(ConfigModel):
    """How long the ranks of a trainer may take."""

    step_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds for one step over a batch, or for writing or reading weights, before the trainer counts as hung."""
    start_s: Annotated[float, Field(gt=0)] = 180.0
    """Seconds for the ranks to load model and optimizer."""


class TrainerConfig(ConfigModel):
    """The trainer of a policy."""

    ranks: Annotated[int, Field(gt=0)] = 1
    """Processes that share the model (FSDP2); one per GPU, or one on a CPU."""
    threads: Annotated[int, Field(gt=0)] = 1
    """Processor cores for the arithmetic of each rank."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the ranks compute; cpu uses gloo, cuda NCCL."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward and backward pass; weights and optimizer stay in float32."""
    micro_batch_tokens: Annotated[int, Field(gt=0)] = 8192
    """Tokens of one forward pass of a rank; lower it when memory runs out."""
    logprob_chunk_tokens: Annotated[int, Field(gt=0)] = 1024
    """Rows of logits that exist at once."""
    activation_checkpointing: bool = False
    """Keep only the inputs of each block for the backward pass and compute the rest again: far less memory for
    about a third more time. Switch it on when lowering micro_batch_tokens is not enough."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    lora: LoraConfig | None = None
    """Train adapters instead of the whole model, for a fraction of the optimizer's memory and of what each
    publish sends; none trains every weight."""
    max_gap_nats: Annotated[float, Field(gt=0)] = 1e-3
    """Largest difference of trainer and engine log-probabilities of a fresh token, one that was drawn by the very
    weights that a step begins with. At every step a sequence with a larger one is masked as a whole: it changes no
    weight, still counts in the denominators, and is counted (``trainer/mismatched_sequences``). One such sequence
    ends the run at the first step with fresh tokens after a start or a resume; later two do, if they are more than
    half of those with fresh tokens: such a fault is the engine's and not that of single answers.

    1e-3 for float32 on both sides, which differ by 4e-6. About 0.5 where either computes in bfloat16: a tiny model
    of experts then differed by 0.03 with routing replay and by 0.8 without, where a router that is nearly undecided
    chooses another expert. Far above 1 the tokens of a wrong request are found no more: those that a small model
    was given lay off by 2.7."""
    gap_report_interval_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between reports of the difference that fresh tokens would have without routing replay and kept
    sets (``trainer/fresh_gap_mean_no_replay_nats``); each costs one forward pass over them. 0 for never."""
    deadlines: TrainerDeadlines = TrainerDeadlines()
    """When a rank counts as hung."""
