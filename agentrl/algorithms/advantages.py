"""Advantages of episodes from the rewards of their group."""

from __future__ import annotations

import torch

_EPSILON = 1e-4
_ROUNDING = 1e-6


def group_advantages(rewards_E: torch.Tensor, groups_E: torch.Tensor, kind: str) -> torch.Tensor:
    """Advantage of each episode; an episode counts once, whatever its branches.

    - ``grpo``: (R - mean) / (std + 1e-4) over the group (arXiv 2402.03300, sec. 4.1.2), with the sample standard
      deviation (squares over G - 1).
    - ``dr_grpo``: R - mean (arXiv 2503.20783).
    - ``leave_one_out``: R - mean of the others (arXiv 2402.14740).

    A group of one has advantage 0, whatever the kind. So has a group whose standard deviation is at most 1e-6 under
    ``grpo``: that is rounding of equal rewards. Episodes that failed are not in the batch, and so not in the mean.

    Peers, from their code: TRL 1.x (``GRPOTrainer``, ``scale_rewards="group"``) has the same deviation and 1e-4;
    verl 0.8 (``compute_grpo_outcome_advantage``) the same deviation and 1e-6, and gives a group of one its raw reward
    as advantage. Neither has the bound against rounding. The small number matters only where rewards nearly agree.

    Example: rewards 1, 0, 0, 0 have mean 1/4 and deviation 1/2, so that ``grpo`` gives 1.4997 and three times
    -0.4999. Rewards 0 and 3e-6 have deviation 2.12e-6 and advantages of 0.0147 to either side (TRL the same; verl
    0.48, and 0.71 without any small number).

    Args:
        rewards_E: finite rewards.
        groups_E: group number of each episode, any integers.
        kind: as above.

    Returns:
        advantages_E, float32.

    Raises:
        ValueError: the kind is unknown.
    """
    advantages_E = torch.zeros(len(rewards_E), dtype=torch.float64)
    for group in groups_E.unique():
        members = groups_E == group
        advantages_E[members] = _of_group(rewards_E[members].double(), kind)
    return advantages_E.float()


def _of_group(rewards_G: torch.Tensor, kind: str) -> torch.Tensor:
    size = len(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    if kind not in ("grpo", "dr_grpo", "leave_one_out"):
        raise ValueError(f"no advantage of kind {kind!r}")
    if size == 1:
        return torch.zeros_like(centred_G)
    if kind == "dr_grpo":
        return centred_G
    if kind == "leave_one_out":
        return centred_G * size / (size - 1)
    std = rewards_G.std(correction=1)
    return centred_G / (std + _EPSILON) if std > _ROUNDING else torch.zeros_like(centred_G)
