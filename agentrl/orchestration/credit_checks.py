"""Whether a policy's credit fits the rest of its recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.algorithms.credit_config import (
    CreditConfig,
    OutcomeCreditConfig,
    SameStateCreditConfig,
    TeacherCreditConfig,
    credit_columns,
)
from agentrl.buffer.config import BufferConfig
from agentrl.rollouts.config import SamplingConfig


def check_credit(policy: str, credit: CreditConfig, scorers: Mapping[str, Sequence[str]]) -> None:
    """Whether there is the scorer that a credit goes by.

    `scorers` has the names of scorers of turns, by the environments that the policy is trained on. Raises ValueError.
    """
    wanted = credit_columns(credit).scorer
    for environment, names in scorers.items():
        if wanted and wanted not in names:
            raise ValueError(
                f"policies.{policy}.algorithm.credit.scorer: environments.{environment} has no scorer of turns "
                f"'{wanted}', only {list(names)}; add one to environments.{environment}.scorers"
            )


def check_credit_of_samples(policy: str, credit: CreditConfig, sampling: SamplingConfig, buffer: BufferConfig) -> None:
    """Whether a credit is unbiased for tokens that are drawn and chosen so. Raises ValueError."""
    by_outcome = isinstance(credit, OutcomeCreditConfig | SameStateCreditConfig)
    if not by_outcome and buffer.group_filter == "spread":
        raise ValueError(
            f'policies.{policy}.algorithm.credit.kind = "{credit.kind}" also learns from groups whose rewards '
            'agree, and is biased without them: set buffer.group_filter = "none"'
        )
    is_changed = sampling.temperature != 1 or sampling.top_k is not None or sampling.top_p < 1
    if isinstance(credit, TeacherCreditConfig) and is_changed:
        raise ValueError(
            f'policies.{policy}.algorithm.credit.kind = "teacher" compares log-probabilities with a teacher\'s '
            "at temperature 1 over all tokens: sample so, with temperature 1, without top_k and with top_p 1"
        )
