"""How what a scorer says goes with how episodes end: a correlation, and an alarm when the two part."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, pvariance

from agentrl.scorers.definition import TurnScorerConfig
from agentrl.types.errors import AgentRLError
from agentrl.types.turn_score import TurnScore

_SIGNIFICANT = 2.5  # standard errors
_log = logging.getLogger(__name__)


class ScoreTrends:
    """The last episodes' mean values and outcomes; as many as the scorer's `divergence.episodes`.

    The process reward has parted from the outcome when, from the older half of these episodes to the newer, its mean
    rose and the outcome's fell, each by more than 2.5 standard errors: the policy learns to please the scorer.

    Example: values of .4 and then .7, outcomes of .8 and then .5, over 128 episodes each.
    """

    def __init__(self, config: TurnScorerConfig) -> None:
        self._config = config
        self._pairs: deque[tuple[float, float]] = deque(maxlen=config.divergence.episodes)
        self._since = self._alarms = 0

    def add(self, scores: Sequence[TurnScore], outcome: float | None) -> None:
        """An episode is over. Raises AgentRLError if the alarm stops the run."""
        values = [score.value for score in scores if score.value is not None]
        if not values or outcome is None:
            return
        self._pairs.append((fmean(values), outcome))
        self._since += 1
        if self._config.divergence.action != "ignore" and self._since >= self._config.divergence.episodes // 2:
            self._compare()

    def metrics(self) -> dict[str, float]:
        """Correlation of mean value and outcome, the means, and alarms so far."""
        if len(self._pairs) < 2:
            return {}
        name = f"scorer/{self._config.name}"
        values, outcomes = zip(*self._pairs, strict=True)
        found: dict[str, float] = {
            f"{name}/value_mean": fmean(values),
            f"{name}/divergence_alarms_total": float(self._alarms),
        }
        if (r := correlation(values, outcomes)) is not None:
            found[f"{name}/outcome_correlation"] = r
        return found

    def _compare(self) -> None:
        if len(self._pairs) < self._config.divergence.episodes:
            return
        half = len(self._pairs) // 2
        values, outcomes = zip(*self._pairs, strict=True)
        rise, fall = _change(values, half), _change(outcomes, half)
        if rise < _SIGNIFICANT or fall > -_SIGNIFICANT:
            return
        self._since = 0
        self._alarms += 1
        text = (
            f"scorer '{self._config.name}': over the last {len(self._pairs)} episodes its value rose from "
            f"{fmean(values[:half]):.3f} to {fmean(values[half:]):.3f} while the outcome fell from "
            f"{fmean(outcomes[:half]):.3f} to {fmean(outcomes[half:]):.3f}: the policy learns to please the scorer"
        )
        if self._config.divergence.action == "stop":
            raise AgentRLError(f"{text}; train the scorer anew on these episodes, or take it out of the credit")
        _log.warning("%s", text)


def correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson's, from -1 to 1; None where one of them does not vary."""
    mean_a, mean_b = fmean(first), fmean(second)
    spread = math.sqrt(pvariance(first, mean_a) * pvariance(second, mean_b))
    if spread == 0:
        return None
    return fmean((a - mean_a) * (b - mean_b) for a, b in zip(first, second, strict=True)) / spread


def _change(numbers: Sequence[float], half: int) -> float:
    """From the first half to the second, in standard errors of the difference."""
    before, after = numbers[:half], numbers[half:]
    error = math.sqrt(pvariance(before) / len(before) + pvariance(after) / len(after))
    return (fmean(after) - fmean(before)) / max(error, 1e-9)
