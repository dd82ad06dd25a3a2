"""Splits a batch into minibatches, one optimizer step each: by episode, anew in every epoch, the same on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.algorithms.aggregation import token_scales
from agentrl.algorithms.config import AlgorithmConfig
from agentrl.trainer.advantages import token_advantages
from agentrl.trainer.selection import places_in_loss
from agentrl.trainer.sequence import TokenSequence
from agentrl.types.batch import TrainBatch


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """What one optimizer step learns from: sequences, and the index of each among all that the batch selected.

    The scales of the sequences are those of the minibatch.
    """

    indices: tuple[int, ...]
    sequences: tuple[TokenSequence, ...]

    @classmethod
    def of_all(cls, sequences: Sequence[TokenSequence]) -> Minibatch:
        """The whole batch at once."""
        return cls(tuple(range(len(sequences))), tuple(sequences))

    def without(self, left_out: Collection[int]) -> Minibatch:
        """The minibatch less the sequences of some indices; the scales of the others stay."""
        pairs = [(i, s) for i, s in zip(self.indices, self.sequences, strict=True) if i not in left_out]
        return Minibatch(tuple(i for i, _ in pairs), tuple(s for _, s in pairs))


def split_batch(
    batch: TrainBatch, sequences: Sequence[TokenSequence], config: AlgorithmConfig
) -> tuple[Minibatch, ...]:
    """The minibatches of all epochs, in order: `config.epochs` times `config.minibatches`.

    In every epoch the episodes with a token in the loss are shuffled by a generator that is seeded with the step of
    the batch's version and the number of the epoch, and dealt out evenly; all branches of an episode stay together.
    So a step that is done again, in whatever epoch of the run, splits its batch as the first time. verl splits in
    the order of the batch unless its ``shuffle`` is set; TRL shuffles once and repeats the same slices.

    Args:
        batch: the whole batch.
        sequences: what `select_sequences` made of it. Episodes without advantage are dealt out too: they count in
            the denominators of their minibatch, which may have nothing else.
        config: how many.
    """
    if config.minibatches * config.epochs == 1:
        return (Minibatch.of_all(sequences),)
    places = places_in_loss(batch, token_advantages(batch, config), config)
    trained = [n for n, e in enumerate(batch.episodes) if any(t.loss_mask.any() for t in e.trajectories)]
    parts = []
    for epoch in range(config.epochs):
        order = np.random.default_rng([batch.version.step, epoch]).permutation(trained)
        parts += [sorted(part.tolist()) for part in np.array_split(order, config.minibatches)]
    return tuple(_minibatch(batch, part, places, sequences, config) for part in parts)


def _minibatch(
    batch: TrainBatch,
    numbers: list[int],
    places: list[tuple[int, int]],
    sequences: Sequence[TokenSequence],
    config: AlgorithmConfig,
) -> Minibatch:
    """The minibatch of the episodes of these numbers."""
    part = dataclasses.replace(batch, episodes=tuple(batch.episodes[number] for number in numbers))
    scales = dict(zip(numbers, token_scales(part, config.aggregation, config.constant_tokens), strict=True))
    indices = tuple(index for index, (number, _) in enumerate(places) if number in scales)
    scaled = (
        dataclasses.replace(sequences[i], scales=scales[places[i][0]][places[i][1]][sequences[i].selected])
        for i in indices
    )
    return Minibatch(indices, tuple(scaled))
