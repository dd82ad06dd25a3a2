"""How far fresh tokens would lie from the engine's log-probabilities without the replay contract."""

from __future__ import annotations

import torch
import torch.distributed as dist

from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.packing import deal, pack
from agentrl.trainer.sequence import TokenSequence


def no_replay_gap(
    policy: PolicyModel, sequences: list[TokenSequence], config: TrainerConfig, temperature: float
) -> dict[str, float]:
    """The gap of fresh tokens when the live routers choose and nothing is cut from the distribution.

    Put beside ``trainer/fresh_gap_mean_nats`` of the same step it says what routing replay and kept sets are
    worth. One forward pass over the sequences that have fresh tokens; every rank calls it with the same.

    Returns:
        ``trainer/fresh_gap_mean_no_replay_nats`` and ``..._max_...``, equal on all ranks; empty without fresh
        tokens.
    """
    fresh = [s for s in sequences if (s.staleness == 0).any()]
    if not fresh:
        return {}
    shares = deal([len(s.token_ids) for s in fresh], dist.get_world_size(), config.micro_batch_tokens)
    sums = torch.zeros(2, dtype=torch.float64, device=config.device)
    most = torch.zeros(1, dtype=torch.float64, device=config.device)
    for indices in shares[dist.get_rank()]:
        batch = pack([fresh[i] for i in indices], config.device).without_replay()
        with torch.no_grad():
            gap_S = (policy(batch, temperature) - batch.behaviour_S).abs().double()
        gap_F = gap_S[batch.staleness_S == 0]
        sums += torch.stack([gap_F.sum(), gap_F.new_tensor(len(gap_F))])
        most = torch.maximum(most, gap_F.max() if len(gap_F) else most)
    dist.all_reduce(sums)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {
        "trainer/fresh_gap_mean_no_replay_nats": float(sums[0] / sums[1]),
        "trainer/fresh_gap_max_no_replay_nats": float(most),
    }
