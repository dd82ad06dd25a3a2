"""Which part of an episode's reward each of its turns and tokens is credited with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.base import ConfigModel
from agentrl.types.batch import CreditColumns

Discount = Annotated[float, Field(gt=0, le=1)]


class OutcomeCreditConfig(ConfigModel):
    """Every token has the advantage of its agent's whole reward."""

    kind: Literal["outcome"] = "outcome"
    """The outcome alone."""


class ShapingCreditConfig(ConfigModel):
    """Potential-based shaping (Ng et al. 1999): scores of turns say when the outcome was decided, never what it is.

    Needs ``advantage = "leave_one_out"``.
    """

    kind: Literal["shaping"]
    """Scores of states as potentials."""
    scorer: str
    """Name of the scorer of turns whose values of states are the potentials."""
    gamma: Discount = 1.0
    """Weight of a reward for each turn that lies between it and the start. Below 1 the discounted outcome is what is
    optimised: early success is preferred."""


class TurnCreditConfig(ConfigModel):
    """Reward-to-go of each turn, compared with the same turn of the group's other episodes.

    Needs ``advantage = "leave_one_out"``.
    """

    kind: Literal["turn_leave_one_out"]
    """Turn by turn, leave one out."""
    gamma: Discount = 1.0
    """Weight of a reward for each turn that lies between it and the start; below 1 as for ``shaping``."""
    scorer: str = ""
    """Name of a scorer of turns whose values of states are potentials besides; empty for none."""


class SameStateCreditConfig(ConfigModel):
    """The outcome, compared among episodes that went on from the same state (forked ones), with no others."""

    kind: Literal["same_state"]
    """Groups of one state."""


class TeacherCreditConfig(ConfigModel):
    """On-policy distillation by reverse KL, besides the outcome; with a reference policy as teacher a KL penalty."""

    kind: Literal["teacher"]
    """Log-probabilities of another policy."""
    scorer: str
    """Name of the scorer of turns whose log-probabilities are the teacher's."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """What log pi_T - log pi of a token counts in its advantage."""
    outcome_weight: Annotated[float, Field(ge=0)] = 1.0
    """What the advantage of the outcome counts; 0 distils alone, and needs no groups."""


CreditConfig = Annotated[
    OutcomeCreditConfig | ShapingCreditConfig | TurnCreditConfig | SameStateCreditConfig | TeacherCreditConfig,
    Field(discriminator="kind"),
]


def credit_columns(credit: CreditConfig) -> CreditColumns:
    """What a rule wants to know of each turn."""
    match credit:
        case ShapingCreditConfig() | TurnCreditConfig():
            return CreditColumns(potentials=credit.scorer, turn_rewards=True)
        case TeacherCreditConfig():
            return CreditColumns(teacher=credit.scorer)
        case OutcomeCreditConfig() | SameStateCreditConfig():
            return CreditColumns()
