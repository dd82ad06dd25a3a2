"""How episodes are played: sampling, limits, and how many at once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentrl.config.base import ConfigModel
from agentrl.types.generation import Sampling
from agentrl.types.task import Limits


class SamplingConfig(ConfigModel):
    """The distribution that tokens are drawn from; the trainer sees exactly its log-probabilities."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Softmax temperature; 1 trains the policy that is served."""
    top_k: Annotated[int, Field(gt=1)] | None = None
    """Keep only that many likeliest tokens; none keeps all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the likeliest tokens up to this probability; below 1 it needs top_k."""
    routed_experts: bool = False
    """Record which experts each token used and train with the same ones (routing replay); for models with
    experts only. SGLang needs the flag --enable-return-routed-experts."""

    @model_validator(mode="after")
    def _top_p_needs_top_k(self) -> SamplingConfig:
        if self.top_p < 1 and self.top_k is None:
            raise ValueError("top_p below 1 needs a finite top_k: engines report the kept set only then; set top_k")
        return self

    def build(self, routing: tuple[int, int] | None = None) -> Sampling:
        """The record that requests carry; `routing` is (layers, experts per token) of the policy's model."""
        return Sampling(self.temperature, self.top_k, self.top_p, routing if self.routed_experts else None)


class LimitsConfig(ConfigModel):
    """What one episode may use."""

    max_turns: Annotated[int, Field(gt=0)] = 8
    """Replies of an agent; one more than the task needs leaves room to recover from a mistake."""
    max_context_tokens: Annotated[int, Field(gt=0)] = 4096
    """Prompt and replies together; at most the engine's context length."""
    max_reply_tokens: Annotated[int, Field(gt=0)] = 512
    """Tokens of one reply."""
    tool_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds for one call into the environment."""
    total_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds for the whole episode, pauses for new weights included."""
    max_sampled_tokens: Annotated[int, Field(gt=0)] | None = None
    """Tokens of all replies of an agent together; none bounds them by turns and replies alone. Set it for programs,
    which may call a policy as often as max_turns says."""

    def build(self) -> Limits:
        """The record that sessions carry."""
        return Limits(**self.model_dump())


class ScaffoldConfig(ConfigModel):
    """Which program makes an agent of the policy."""

    name: str = "tool_calling"
    """Registered name, or ``module:Class``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the scaffold."""


class RolloutConfig(ConfigModel):
    """How episodes are produced."""

    concurrency: Annotated[int, Field(gt=0)] = 64
    """Episodes that generate at once (places). Enough to fill the engines' batches."""
    max_attempts: Annotated[int, Field(gt=0)] = 2
    """Times that a task's episode is dispatched before its infrastructure failure is final; and how often an episode
    may lose the process of its worker and go on in another."""
    max_consecutive_failures: Annotated[int, Field(gt=0)] = 50
    """Failed episodes in a row after which the run stops: by then the cause is not the task."""
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Processes that play episodes; 0 plays them in the run's own. "auto" is 0 for scaffolds that ship with agentrl and
    1 for all others, which may hang or crash; more where one processor is not enough for all turns."""
    worker_silence_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds without a sign of life from a worker's process until it is killed and its episodes go on in another; and
    from the event loop of the run's own process, whose end it is."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn."""
    limits: LimitsConfig = LimitsConfig()
    """What an episode may use."""
