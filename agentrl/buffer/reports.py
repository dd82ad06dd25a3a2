"""What a ledger tells: where the sampled tokens went, and whether training saw what was dispatched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from agentrl.buffer.ledger import LedgerLine

_OPEN = "run_ended"
_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of the trained episodes against the same of all that were dispatched.

    `ratio` is trained over dispatched mean, NaN where the latter is 0; 95 % of resampled cohorts have it between
    `ratio_low` and `ratio_high`. `ks` is the largest distance of the two distributions, 0 to 1.
    """

    measure: str
    dispatched_mean: float
    trained_mean: float
    ratio: float
    ratio_low: float
    ratio_high: float
    ks: float


@dataclass(frozen=True, slots=True)
class BiasReport:
    """How the trained episodes of an environment differ from all of a closed cohort; empty if none was trained."""

    environment: str
    num_dispatched: int
    num_trained: int
    comparisons: tuple[Comparison, ...]


def goodput(lines: Iterable[LedgerLine]) -> dict[str, float]:
    """Fractions of the sampled tokens by what became of them.

    These are ``trained``, ``masked``, ``dropped_REASON``, and ``regenerated`` for those that were lost with an engine
    and sampled again. What was in flight when a run was killed nobody knows, and it is in none of them.

    Example: of 10 tokens 6 trained and 2 masked, and 2 of an episode of a filtered group: 0.6, 0.2, and
    ``dropped_no_spread`` 0.2.
    """
    tokens: Counter[str] = Counter()
    for line in lines:
        if line.regenerated_tokens:
            tokens["regenerated"] += line.regenerated_tokens
        if line.outcome == "trained":
            tokens["trained"] += line.trained_tokens
            tokens["masked"] += line.masked_tokens
        else:
            tokens[f"dropped_{line.reason}"] += line.sampled_tokens
    total = max(tokens.total(), 1)
    return {name: number / total for name, number in tokens.most_common()}


def closed_cohort(lines: Iterable[LedgerLine]) -> list[LedgerLine]:
    """The lines of all groups before the first open one: of these every episode has come to its end.

    A group is open if the run's end cut off an episode of it, or if a member has no line although a younger
    group has lines: it is still running, or waits for its group or a step. Without this cut an unfinished run
    would look biased towards short episodes, since of the last ones only the short have ended. Of an episode that a
    resumed run played again the last line counts.

    Example: group 0 is trained, 1 is still running, 2 is trained: the cohort is group 0.
    """
    newest = {line.episode_id: line for line in lines}.values()
    members: dict[int, set[int]] = {}
    for line in newest:
        members.setdefault(line.group, set()).add(line.member)
    group_size = max(map(len, members.values()), default=1)
    open_groups = {line.group for line in newest if line.reason == _OPEN}
    end = next(n for n in count() if n in open_groups or len(members.get(n, ())) < group_size)
    return [line for line in newest if line.group < end]


def bias(lines: Iterable[LedgerLine], seed: int = 0) -> list[BiasReport]:
    """Compare length, turns, difficulty and tool time of the trained episodes with the closed cohort's.

    Of several environments each is compared by itself, the first that was dispatched first: their episodes differ, and
    one of which less is trained would look like a bias of length.

    Dispatched is every line of the cohort, failed attempts too; trained are those of which a token entered a
    loss. Length is in sampled tokens; ``trained tokens`` counts those in the loss, so that its ratio also shows
    what masking takes. Difficulty is 1 minus the mean reward of the episode's group; episodes of groups without
    any reward have none and are left out of it.
    """
    lines = list(lines)
    cohort = closed_cohort(lines)
    names = dict.fromkeys(line.environment for line in sorted(lines, key=lambda line: line.group))
    return [_bias(name, [line for line in cohort if line.environment == name], seed) for name in names]


def _bias(environment: str, cohort: Sequence[LedgerLine], seed: int) -> BiasReport:
    is_trained = np.array([line.trained_tokens > 0 for line in cohort], bool)
    if not is_trained.any():
        return BiasReport(environment, len(cohort), 0, ())
    groups, sampled, in_loss, turns, tool_s = np.array(
        [(line.group, line.sampled_tokens, line.trained_tokens, line.turns, line.tool_s) for line in cohort], float
    ).T
    difficulty = _difficulties(cohort)
    measures = {
        "length": (sampled, sampled),
        "trained tokens": (sampled, in_loss),
        "turns": (turns, turns),
        "tool seconds": (tool_s, tool_s),
        "difficulty": (difficulty, difficulty),
    }
    comparisons = []
    for measure, (dispatched, trained) in measures.items():
        known = ~np.isnan(dispatched)
        columns = (dispatched[known], trained[known], is_trained[known], groups[known])
        comparisons.append(compare(measure, *columns, seed=seed))
    return BiasReport(environment, len(cohort), int(is_trained.sum()), tuple(comparisons))


def compare(
    measure: str, dispatched: np.ndarray, trained: np.ndarray, is_trained: np.ndarray, groups: np.ndarray, seed: int = 0
) -> Comparison:
    """Compare a measure of all n episodes of a cohort with the same, or another, of the trained ones.

    Args:
        measure: its name.
        dispatched: [n], the measure of each episode.
        trained: [n], what counts for it where it is trained; elsewhere it is not looked at.
        is_trained: [n] bool.
        groups: [n], the episode's group. Cohorts are resampled by groups, since those are dispatched, trained
            and dropped as a whole and so their episodes are no independent draws.
        seed: of the resampling.
    """
    _, places = np.unique(groups, return_inverse=True)
    columns = (dispatched, np.ones(len(groups)), np.where(is_trained, trained, 0.0), is_trained.astype(float))
    sums = np.stack([np.bincount(places, column) for column in columns], axis=1)  # [groups, 4]
    rng = np.random.default_rng(seed)
    ratios = []
    for _ in range(_RESAMPLES):
        times_drawn = np.bincount(rng.integers(0, len(sums), len(sums)), minlength=len(sums))
        ratios.append(_ratio(times_drawn @ sums))
    low, high = np.nanpercentile(ratios, [2.5, 97.5]) if np.isfinite(ratios).any() else (np.nan, np.nan)
    return Comparison(
        measure=measure,
        dispatched_mean=float(dispatched.mean()),
        trained_mean=float(trained[is_trained].mean()),
        ratio=_ratio(sums.sum(axis=0)),
        ratio_low=float(low),
        ratio_high=float(high),
        ks=ks_distance(dispatched, trained[is_trained]),
    )


def ks_distance(first: np.ndarray, second: np.ndarray) -> float:
    """The two-sample Kolmogorov-Smirnov distance: the largest gap between the shares at or below any value.

    Example: of [1, 2, 3, 4] half are at most 2, of [1, 2] all, and nowhere is the gap larger: 0.5.
    """
    values = np.concatenate([first, second])
    shares = [np.searchsorted(np.sort(sample), values, side="right") / len(sample) for sample in (first, second)]
    return float(np.abs(shares[0] - shares[1]).max())


def _ratio(sums: np.ndarray) -> float:
    """Trained over dispatched mean from [dispatched sum, episodes, trained sum, trained episodes]; NaN if undefined."""
    dispatched_sum, episodes, trained_sum, trained_episodes = sums.tolist()
    if not dispatched_sum or not trained_episodes:
        return float("nan")
    return float((trained_sum / trained_episodes) / (dispatched_sum / episodes))


def _difficulties(cohort: Sequence[LedgerLine]) -> np.ndarray:
    """[n] 1 minus the mean reward of each line's group, NaN where the group has no reward."""
    rewards: dict[int, list[float]] = {}
    for line in cohort:
        if line.reward is not None:
            rewards.setdefault(line.group, []).append(line.reward)
    means = {group: sum(values) / len(values) for group, values in rewards.items()}
    return np.array([1.0 - means.get(line.group, np.nan) for line in cohort])
