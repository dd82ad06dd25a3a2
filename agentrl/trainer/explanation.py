"""Notes what a step's loss makes of each sequence, while it computes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentrl.algorithms.outcome import TokenOutcome, token_fates
from agentrl.algorithms.ratios import safe_exp
from agentrl.trainer.sequence import TokenSequence
from agentrl.types.batch import TrainBatch
from agentrl.types.explanation import TokenTerms


class LossTrace:
    """Terms of this rank's sequences, by their index in the step."""

    def __init__(self) -> None:
        self._terms: dict[int, TokenTerms] = {}

    def add(
        self,
        indices: Sequence[int],
        sequences: Sequence[TokenSequence],
        logprobs_S: torch.Tensor,
        outcome: TokenOutcome,
    ) -> None:
        """Note a micro-batch: the sequences of these indices behind one another, S tokens in all."""
        counts = [len(sequences[index].selected) for index in indices]
        columns = (logprobs_S.detach(), safe_exp(outcome.gap_S), outcome.weights_S)
        parts = [column.cpu().split(counts) for column in columns]
        fates = token_fates(outcome)
        start = 0
        for number, (index, count) in enumerate(zip(indices, counts, strict=True)):
            logprobs, ratios, weights = (part[number].numpy().copy() for part in parts)
            self._terms[index] = TokenTerms(logprobs, ratios, weights, tuple(fates[start : start + count]))
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
