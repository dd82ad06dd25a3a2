"""Every token of a replayed step with its status: what the trainer explained, and what never reached it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from agentrl.buffer.recovery import TakenStep
from agentrl.buffer.staleness import train_view
from agentrl.types.batch import TrainBatch, TrainTrajectory
from agentrl.types.episode import Episode
from agentrl.types.explanation import StepExplanation, TokenStatus, TokenTerms
from agentrl.types.version import PolicyVersion

_WITHHELD = "withheld"


@dataclass(frozen=True, slots=True, eq=False)
class ExplainedBranch:
    """One branch of an episode: L tokens, a status each, and the loss's terms of those that entered it.

    `advantages` are [L] float32 by the rule of credit; None for an episode that is not in the loss.
    """

    view: TrainTrajectory
    statuses: tuple[str, ...]
    terms: TokenTerms | None
    advantages: np.ndarray | None


@dataclass(frozen=True, slots=True, eq=False)
class ExplainedEpisode:
    """An episode of a group that the step took.

    `rewards` and `advantages`, of the outcome, are those of the agents that act by the step's policy; without a reward
    there are none, and no advantages for an episode that is not in the batch.
    """

    episode: Episode
    group: int
    rewards: dict[str, float]
    advantages: dict[str, float]
    branches: tuple[ExplainedBranch, ...]

    @property
    def name(self) -> str:
        """The episode's name, unique in the run."""
        return self.episode.episode_id

    def count(self) -> Counter[str]:
        """Tokens by status; one that several branches share counts in each, as in the loss."""
        return Counter(status for branch in self.branches for status in branch.statuses)


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Everything that is known of one token; None where nothing was computed or sampled.

    `staleness` is in steps, log-probabilities in nats. pi is the policy with which the token was last computed,
    in the last epoch over its batch; `ratio` is pi / mu, `proximal_ratio` pi / pi_prox, `weight` the correction's,
    `advantage` the token's own.
    """

    episode: str
    branch: int
    position: int
    token_id: int
    text: str
    status: str
    turn: int | None = None
    version: str | None = None
    staleness: int | None = None
    behaviour_logprob: float | None = None
    trainer_logprob: float | None = None
    ratio: float | None = None
    proximal_ratio: float | None = None
    advantage: float | None = None
    weight: float | None = None


def explained_episodes(
    taken: TakenStep,
    batch: TrainBatch,
    explanation: StepExplanation,
    left_out: list[tuple[int, Episode, str]],
    max_staleness: float,
) -> tuple[ExplainedEpisode, ...]:
    """All episodes of the step's groups, those behind one another that share a group.

    Args:
        taken: the groups of the step.
        batch: what the trainer got of them.
        explanation: what it made of that.
        left_out: members that are not in the batch: place of the group, episode, reason.
        max_staleness: of the run.
    """
    version = taken.version
    episodes = [episode for group in taken.groups for episode in group.ordered()]
    found = []
    for episode, entry, advantages, of_tokens, terms in zip(
        episodes,
        batch.episodes,
        explanation.advantages,
        explanation.token_advantages,
        explanation.terms,
        strict=True,
    ):
        if entry.trajectories:
            branches = tuple(map(explained_branch, entry.trajectories, terms, of_tokens))
        else:
            branches = dropped_branches(episode, batch.policy, version, max_staleness, _WITHHELD)
        rewards = episode.rewards_of(batch.policy)
        by_agent = {agent: advantages["" if "" in advantages else agent] for agent in rewards}
        found.append(ExplainedEpisode(episode, entry.group, rewards, by_agent, branches))
    for place, episode, reason in left_out:
        branches = dropped_branches(episode, batch.policy, version, max_staleness, reason)
        found.append(ExplainedEpisode(episode, place, episode.rewards_of(batch.policy), {}, branches))
    return tuple(sorted(found, key=lambda e: (e.group, e.episode.ticket.member, e.episode.ticket.attempt)))


def explained_branch(view: TrainTrajectory, terms: TokenTerms | None, advantages: np.ndarray) -> ExplainedBranch:
    """A branch of the batch: tokens in the loss have the trainer's status, sampled ones outside it are too old."""
    statuses = _statuses(view, TokenStatus.STALE)
    selected = np.flatnonzero(view.loss_mask).tolist()
    of_selected = terms.statuses if terms is not None else (TokenStatus.NO_ADVANTAGE,) * len(selected)
    for position, status in zip(selected, of_selected, strict=True):
        statuses[position] = status
    return ExplainedBranch(view, tuple(statuses), terms, advantages)


def dropped_branches(
    episode: Episode, policy: str, version: PolicyVersion, max_staleness: float, reason: str
) -> tuple[ExplainedBranch, ...]:
    """Branches of an episode that did not reach the loss."""
    status = f"{TokenStatus.DROPPED}: {reason}"
    return tuple(
        ExplainedBranch(view, tuple(_statuses(view, status)), None, None)
        for view in train_view(episode, policy, version, max_staleness)
    )


def _statuses(view: TrainTrajectory, of_sampled: str) -> list[str]:
    return [of_sampled if is_sampled else TokenStatus.PROMPT for is_sampled in view.trajectory.sampled]


def token_rows(episode: ExplainedEpisode, decode: Callable[[int], str]) -> Iterator[TokenRow]:
    """A row for every token of every branch, in order."""
    for number, branch in enumerate(episode.branches):
        yield from _branch_rows(episode, number, branch, decode)


def _branch_rows(
    episode: ExplainedEpisode, number: int, branch: ExplainedBranch, decode: Callable[[int], str]
) -> Iterator[TokenRow]:
    trajectory = branch.view.trajectory
    versions = {at: str(span.version) for span in trajectory.versions for at in range(span.start, span.end)}
    terms = branch.terms
    places = {} if terms is None else {at: n for n, at in enumerate(np.flatnonzero(branch.view.loss_mask).tolist())}
    for position, token_id in enumerate(trajectory.token_ids.tolist()):
        row = (episode.name, number, position, token_id, decode(token_id), str(branch.statuses[position]))
        if position not in versions:
            yield TokenRow(*row)
            continue
        sampled = TokenRow(
            *row,
            turn=int(trajectory.turns[position]),
            version=versions[position],
            staleness=int(branch.view.staleness[position]),
            behaviour_logprob=float(trajectory.logprobs[position]),
            advantage=None if branch.advantages is None else float(branch.advantages[position]),
        )
        place = places.get(position)
        yield sampled if terms is None or place is None else _with_terms(sampled, terms, place)


def _with_terms(row: TokenRow, terms: TokenTerms, place: int) -> TokenRow:
    return replace(
        row,
        trainer_logprob=float(terms.logprobs[place]),
        ratio=float(terms.ratios[place]),
        proximal_ratio=float(terms.proximal_ratios[place]),
        advantage=float(terms.advantages[place]),
        weight=float(terms.weights[place]),
    )
