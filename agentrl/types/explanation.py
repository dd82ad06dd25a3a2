"""What a step did to each token of its batch, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from agentrl.types.batch import StepReport


class TokenStatus(StrEnum):
    """What became of a token in a step.

    ``prompt`` was not sampled. ``kept``, ``clipped`` and ``rejected`` were computed: ``clipped`` names the side on
    which the loss's bound cuts the gradient (or, for CISPO, the weight), ``rejected`` has a correction weight of 0.
    ``mismatched`` is every token of a sequence that the engine and the trainer, with the same weights, see too
    differently: it was compared and masked. The others were not computed: too old, of an episode whose advantage is
    0 under a loss that vanishes with it, or of an episode that is not in the loss, whose reason stands behind the
    word.

    Where a batch is learned from in several epochs, the status is that of the last in which the token was computed.
    """

    PROMPT = "prompt"
    KEPT = "kept"
    CLIPPED_LOW = "clipped: low"
    CLIPPED_HIGH = "clipped: high"
    REJECTED = "rejected"
    MISMATCHED = "masked: mismatched"
    STALE = "masked: stale"
    NO_ADVANTAGE = "skipped: no advantage"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, eq=False)
class TokenTerms:
    """What the loss made of the S tokens of one trajectory that entered it, when it was last computed.

    pi is the policy just before the last optimizer step that the trajectory took part in: with one optimizer step a
    batch, the policy before the step. `ratios` are pi / mu, to the policy that sampled; `proximal_ratios` pi / pi_prox,
    to the policy before the batch's first optimizer step. `weights` multiply the loss. `advantages` have a teacher's
    term in them, which depends on pi.
    """

    logprobs: np.ndarray  # [S] float32, log pi in nats
    ratios: np.ndarray  # [S] float32
    proximal_ratios: np.ndarray  # [S] float32, 1 with one optimizer step a batch
    weights: np.ndarray  # [S] float32, 0 where mismatched
    advantages: np.ndarray  # [S] float32
    statuses: tuple[TokenStatus, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepExplanation:
    """A step's report, the advantages of each episode's outcome, and what the loss made of each trajectory.

    `advantages` are by agent, under the empty name where one acts. By episode and trajectory of the batch are
    `token_advantages`, [L] float32 as the rule of credit has them, and `terms`, None where a trajectory was left out of
    the computation.
    """

    report: StepReport
    advantages: tuple[dict[str, float], ...]
    token_advantages: tuple[tuple[np.ndarray, ...], ...]
    terms: tuple[tuple[TokenTerms | None, ...], ...]
