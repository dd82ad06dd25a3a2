"""Which algorithm trains a policy: baseline, loss, off-policy correction, aggregation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.algorithms.credit_config import CreditConfig, OutcomeCreditConfig, ShapingCreditConfig, TurnCreditConfig
from agentrl.config.base import ConfigModel


class PpoConfig(ConfigModel):
    """PPO-clip (arXiv 1707.06347, eq. 7) with the higher upper clip of DAPO (arXiv 2503.14476).

    Clipping against the recomputed policy needs several optimizer steps a batch. With one (``minibatches`` and
    ``epochs`` 1, the defaults) that policy is the one being trained, every ratio is 1 and both bounds do nothing:
    only the correction acts.
    """

    kind: Literal["ppo"] = "ppo"
    """PPO-clip."""
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    """Ratio may fall to 1 - clip_low before the gradient stops."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """Ratio may rise to 1 + clip_high before the gradient stops."""
    proximal: Literal["recomputed", "behaviour"] = "recomputed"
    """What the ratio is taken against: the trainer's own policy before the first optimizer step on the batch
    (decoupled PPO, arXiv 2505.24298; staleness is then left to the correction), or the policy that sampled."""


class CispoConfig(ConfigModel):
    """CISPO (arXiv 2506.13585, eq. 4): clips the weight, never the gradient."""

    kind: Literal["cispo"] = "cispo"
    """CISPO."""
    clip_low: Annotated[float, Field(gt=0)] = 1.0
    """Weight is at least 1 - clip_low; 1 leaves no lower bound, as its authors do."""
    clip_high: Annotated[float, Field(gt=0)] = 4.0
    """Weight is at most 1 + clip_high."""


class DppoConfig(ConfigModel):
    """DPPO with a binary total-variation trust region (arXiv 2602.04879) and a small quadratic KL."""

    kind: Literal["dppo"] = "dppo"
    """DPPO."""
    threshold: Annotated[float, Field(gt=0)] = 0.2
    """A token leaves the loss once its probability moved this far in the advantage's direction."""
    kl_weight: Annotated[float, Field(ge=0)] = 1e-3
    """Weight of the squared log-ratio."""


LossConfig = Annotated[PpoConfig | CispoConfig | DppoConfig, Field(discriminator="kind")]


class NoCorrectionConfig(ConfigModel):
    """Tokens count as if the policy that is trained had sampled them."""

    kind: Literal["none"] = "none"
    """No correction."""


class TisConfig(ConfigModel):
    """Truncated importance sampling: weight min(exp d, cap), detached."""

    kind: Literal["tis"] = "tis"
    """Truncated importance sampling."""
    level: Literal["token", "turn", "sequence"] = "token"
    """Over what d is summed: single tokens, an agent's turns (variance bounded by the turn), or all."""
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Largest weight; 2 at token level, up to 10 at sequence level."""


class IcePopConfig(ConfigModel):
    """IcePop: weight exp d where it lies within bounds, 0 elsewhere; counted as masked."""

    kind: Literal["icepop"] = "icepop"
    """IcePop."""
    low: Annotated[float, Field(gt=0)] = 0.5
    """Smallest weight that is kept."""
    high: Annotated[float, Field(gt=0)] = 5.0
    """Largest weight that is kept."""


CorrectionConfig = Annotated[NoCorrectionConfig | TisConfig | IcePopConfig, Field(discriminator="kind")]


def is_corrected_by_loss(config: LossConfig) -> bool:
    """Whether the loss itself takes its ratio against mu, so that a weight on top would count it twice."""
    match config:
        case PpoConfig():
            return config.proximal != "recomputed"
        case CispoConfig() | DppoConfig():
            return True


class AlgorithmConfig(ConfigModel):
    """How rewards become a gradient.

    The names of peers, where they differ::

        here                TRL GRPOConfig                          verl
        minibatches         steps_per_generation /                  train_batch_size / ppo_mini_batch_size
                            gradient_accumulation_steps
        epochs              num_iterations                          ppo_epochs
        loss.clip_low       epsilon                                 clip_ratio_low
        loss.clip_high      epsilon_high                            clip_ratio_high
        loss.proximal       old_per_token_logps, sampled or         old_log_probs; bypass_mode is "behaviour"
                            recomputed
        correction          vllm_importance_sampling_mode        rollout_correction.rollout_is, ..._threshold
        advantage           scale_rewards "group", "none"           norm_adv_by_std_in_grpo
        aggregation         loss_type "dapo", "grpo", "dr_grpo"     loss_agg_mode "token-mean",
                                                                    "seq-mean-token-mean", "seq-mean-token-sum-norm"
    """

    advantage: Literal["grpo", "dr_grpo", "leave_one_out"] = "grpo"
    """Baseline within a group: mean with division by the standard deviation, without, or mean of the others."""
    credit: CreditConfig = OutcomeCreditConfig()
    """How a reward becomes the advantages of turns and tokens."""
    loss: LossConfig = PpoConfig()
    """The loss of a token."""
    correction: CorrectionConfig = TisConfig()
    """Weight of a token for the distance between the policy that sampled it and the one that is trained."""
    aggregation: Literal["token", "episode", "constant"] = "token"
    """What a token's loss is divided by: all trained tokens, its episode's, or a constant per episode."""
    constant_tokens: Annotated[int, Field(gt=0)] = 1024
    """Tokens that an episode counts for under the aggregation ``constant``."""
    minibatches: Annotated[int, Field(gt=0)] = 1
    """Parts that a batch is split into, by episode and anew in each epoch; each that has something to learn makes
    one optimizer step. More make larger use of a large batch, at the price of updates that lie further from the
    policy that sampled. Whatever their number, a batch makes one version."""
    epochs: Annotated[int, Field(gt=0)] = 1
    """Times that each episode of a batch is learned from. More where generating costs far more than training.

    With more than one optimizer step (minibatches times epochs) the trainer first computes the log-probabilities of
    the whole batch by one forward pass without gradient: the proximal policy of PPO and of the correction. With a
    single one they are at hand, the ratio to them is 1, and PPO against them clips nothing."""

    @model_validator(mode="after")
    def _scores_have_no_say(self) -> AlgorithmConfig:
        if isinstance(self.credit, ShapingCreditConfig | TurnCreditConfig) and self.advantage != "leave_one_out":
            raise ValueError(
                f'credit.kind = "{self.credit.kind}" has the mean of the group\'s other episodes as its baseline: set '
                f'advantage = "leave_one_out"; "{self.advantage}" would let an episode\'s own outcome scale its credit'
            )
        return self

    @property
    def is_corrected(self) -> bool:
        """Whether the correction or the loss allows for the distance of the policy that sampled a token."""
        return not isinstance(self.correction, NoCorrectionConfig) or is_corrected_by_loss(self.loss)
