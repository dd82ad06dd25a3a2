"""What an optimizer step did to each token of its batch, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from agentrl.types.batch import StepReport


class Fate(StrEnum):
    """What became of a token in a step.

    ``prompt`` was not sampled. ``kept``, ``clipped`` and ``rejected`` were computed: ``clipped`` names the side on
    which the loss's bound cuts the gradient (or, for CISPO, the weight), ``rejected`` has a correction weight of 0.
    The others were not: too old, of an episode whose advantage is 0 under a loss that vanishes with it, or of an
    episode that is not in the loss, whose reason stands behind the word.
    """

    PROMPT = "prompt"
    KEPT = "kept"
    CLIPPED_LOW = "clipped: low"
    CLIPPED_HIGH = "clipped: high"
    REJECTED = "rejected"
    STALE = "masked: stale"
    NO_ADVANTAGE = "skipped: no advantage"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, eq=False)
class TokenTerms:
    """What the loss made of the S tokens of one trajectory that entered it.

    `ratios` are pi / mu: of the weights before the step to those that sampled. `weights` multiply the loss.
    """

    logprobs: np.ndarray  # [S] float32, nats, by the weights before the step
    ratios: np.ndarray  # [S] float32
    weights: np.ndarray  # [S] float32
    fates: tuple[Fate, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepExplanation:
    """A step's report, each episode's advantage, and what the loss made of each trajectory.

    `terms` are by episode and trajectory of the batch, None where a trajectory was left out of the computation.
    """

    report: StepReport
    advantages: tuple[float, ...]
    terms: tuple[tuple[TokenTerms | None, ...], ...]
