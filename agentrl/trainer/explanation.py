"""Notes what a step's loss makes of each sequence, while it computes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentrl.algorithms.outcome import TokenOutcome, token_statuses
from agentrl.algorithms.ratios import safe_exp
from agentrl.trainer.minibatches import Minibatch
from agentrl.types.batch import TrainBatch
from agentrl.types.explanation import TokenTerms


class LossTrace:
    """Terms of this rank's sequences, by their index in the step; of several passes the last one's."""

    def __init__(self) -> None:
        self._terms: dict[int, TokenTerms] = {}

    def add(
        self,
        part: Minibatch,
        logprobs_S: torch.Tensor,
        outcome: TokenOutcome,
        mismatched_S: torch.Tensor,
    ) -> None:
        """Note a micro-batch: some sequences behind one another, S tokens in all."""
        counts = [len(sequence.selected) for sequence in part.sequences]
        ratio_S, moved_S = safe_exp(outcome.gap_S), safe_exp(outcome.moved_S)
        weights_S = outcome.weights_S.masked_fill(mismatched_S, 0.0)
        columns = logprobs_S.detach(), ratio_S, moved_S, weights_S, outcome.advantages_S
        pieces = [column.cpu().split(counts) for column in columns]
        statuses = token_statuses(outcome, mismatched_S)
        start = 0
        for number, (index, count) in enumerate(zip(part.indices, counts, strict=True)):
            logprobs, ratios, moved, weights, advantages = (piece[number].numpy().copy() for piece in pieces)
            of_sequence = tuple(statuses[start : start + count])
            self._terms[index] = TokenTerms(logprobs, ratios, moved, weights, advantages, of_sequence)
            start += count

    def by_trajectory(
        self, batch: TrainBatch, places: Sequence[tuple[int, int]]
    ) -> tuple[tuple[TokenTerms | None, ...], ...]:
        """The terms by episode and trajectory, given the place in the batch of each sequence of the step."""
        found = {place: self._terms[index] for index, place in enumerate(places)}
        return tuple(
            tuple(found.get((number, branch)) for branch in range(len(episode.trajectories)))
            for number, episode in enumerate(batch.episodes)
        )
