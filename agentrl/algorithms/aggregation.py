"""How much each token's loss counts: the denominators, with tokens masked for staleness left out."""

from __future__ import annotations

import numpy as np

from agentrl.types.batch import TrainBatch


def token_scales(batch: TrainBatch, aggregation: str, constant_tokens: int) -> list[list[np.ndarray]]:
    """Scale of every token, by episode and trajectory: weight in the graph over the denominator.

    - ``token``: 1 / trained tokens of the batch (DAPO).
    - ``episode``: 1 / (episodes x trained tokens of the episode) (GRPO).
    - ``constant``: 1 / (episodes x constant_tokens) (Dr. GRPO).

    Tokens are counted with their weights in the graph, so an episode with branches counts like the
    nodes that it is made of. Episodes are those with at least one trained token. A token that a
    correction weighs 0 still counts, so that rejecting tokens does not inflate the others.

    Where a batch is split, `batch` holds the episodes of one minibatch, whose tokens and episodes make its
    denominators: so does verl (``batch_num_tokens``). TRL does for all but ``loss_type="dapo"``, which divides every
    slice by the tokens of the whole generation batch.

    Raises:
        ValueError: the aggregation is unknown.
    """
    weights = [[t.trajectory.weights * t.loss_mask for t in e.trajectories] for e in batch.episodes]
    counts = [float(sum(w.sum() for w in episode)) for episode in weights]
    num_episodes = max(sum(count > 0 for count in counts), 1)
    total = max(sum(counts), 1.0)
    denominators = {
        "token": [total] * len(counts),
        "episode": [num_episodes * max(count, 1.0) for count in counts],
        "constant": [float(num_episodes * constant_tokens)] * len(counts),
    }
    if aggregation not in denominators:
        raise ValueError(f"no aggregation {aggregation!r}")
    pairs = zip(weights, denominators[aggregation], strict=True)
    return [[w / denominator for w in episode] for episode, denominator in pairs]
