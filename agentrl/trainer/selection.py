"""From a batch of episodes to token sequences: advantages, scales, and what needs no computing."""

from __future__ import annotations

import numpy as np

from agentrl.algorithms.aggregation import token_scales
from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.credit_config import TeacherCreditConfig
from agentrl.algorithms.losses import vanishes_without_advantage
from agentrl.trainer.advantages import TokenAdvantages, token_advantages
from agentrl.trainer.sequence import TokenSequence
from agentrl.types.batch import TrainBatch, TrainTrajectory
from agentrl.types.generation import KeptTokens


def select_sequences(batch: TrainBatch, config: AlgorithmConfig) -> list[TokenSequence]:
    """The batch's trajectories that have something to learn from, in the batch's order.

    Every rank computes the same from the same batch. Trajectories without a token in the loss are left
    out, and so are those of advantage 0 where the loss vanishes with it; both still count in baselines
    and denominators.
    """
    advantages = token_advantages(batch, config)
    scales = token_scales(batch, config.aggregation, config.constant_tokens)
    has_teacher = isinstance(config.credit, TeacherCreditConfig)
    return [
        _sequence(
            batch.episodes[number].trajectories[branch], scales[number][branch], advantages[number][branch], has_teacher
        )
        for number, branch in places_in_loss(batch, advantages, config)
    ]


def places_in_loss(batch: TrainBatch, advantages: TokenAdvantages, config: AlgorithmConfig) -> list[tuple[int, int]]:
    """Index of the episode, and of the trajectory in it, of every selected sequence, in order."""
    return [
        (number, branch)
        for number, episode in enumerate(batch.episodes)
        for branch, trained in enumerate(episode.trajectories)
        if trained.loss_mask.any() and _teaches(trained, advantages[number][branch], config)
    ]


def _teaches(trained: TrainTrajectory, advantages: np.ndarray, config: AlgorithmConfig) -> bool:
    """Whether the loss of a trajectory may have a gradient; its distance to a teacher is known in the step alone."""
    if isinstance(config.credit, TeacherCreditConfig) and trained.teacher_logprobs is not None:
        return True
    return bool(advantages[trained.loss_mask].any()) or not vanishes_without_advantage(config.loss)


def _sequence(trained: TrainTrajectory, scale: np.ndarray, advantages: np.ndarray, has_teacher: bool) -> TokenSequence:
    trajectory, teacher = trained.trajectory, trained.teacher_logprobs if has_teacher else None
    selected = np.flatnonzero(trained.loss_mask)
    last = int(selected[-1]) + 1
    return TokenSequence(
        token_ids=trajectory.token_ids[:last],
        selected=selected,
        logprobs=trajectory.logprobs[selected],
        advantages=advantages[selected],
        scales=scale[selected],
        turns=trajectory.turns[selected],
        staleness=_staleness(trained)[selected],
        kept_tokens=_select_kept(trajectory.kept_tokens, trajectory.sampled, trained.loss_mask),
        routed_experts=None if trajectory.routed_experts is None else trajectory.routed_experts[:last],
        teacher_logprobs=None if teacher is None else teacher[selected],
    )


def _staleness(trained: TrainTrajectory) -> np.ndarray:
    """Staleness of each token, in steps, at least 1 where it is not fresh; with recorded experts that of the oldest
    token up to it.

    Experts are recorded once. So when weights change within an episode the engine computes the context again by
    its new routers, but the trainer by the old ones' choice: tokens behind the change are no measure of how well
    engine and trainer agree.
    """
    staleness = trained.staleness
    if trained.fresh is not None:
        is_sampled_before = trained.trajectory.sampled & ~trained.fresh
        staleness = np.where(is_sampled_before, np.maximum(staleness, 1), staleness)
    return staleness if trained.trajectory.routed_experts is None else np.maximum.accumulate(staleness)


def _select_kept(kept: KeptTokens | None, sampled: np.ndarray, mask: np.ndarray) -> KeptTokens | None:
    """Kept sets of the tokens in the loss, from sets of all sampled tokens."""
    if kept is None:
        return None
    chosen = np.flatnonzero(mask[sampled])
    sets = [kept.ids[kept.offsets[i] : kept.offsets[i + 1]].tolist() for i in chosen]
    return KeptTokens.from_lists(sets)
