"""Advantages of episodes from the rewards of their group."""

from __future__ import annotations

import torch

_MIN_STD = 1e-6


def group_advantages(rewards_E: torch.Tensor, groups_E: torch.Tensor, kind: str) -> torch.Tensor:
    """Advantage of each episode; an episode counts once, whatever its branches.

    - ``grpo``: (R - mean) / std over the group (arXiv 2402.03300, sec. 4.1.2). Deviation: the population
      standard deviation, and 0 for a group whose rewards do not differ.
    - ``dr_grpo``: R - mean (arXiv 2503.20783).
    - ``leave_one_out``: R - mean of the others (arXiv 2402.14740); 0 in a group of one.

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
    if kind == "dr_grpo":
        return centred_G
    if kind == "leave_one_out":
        return centred_G * size / (size - 1) if size > 1 else torch.zeros_like(centred_G)
    if kind == "grpo":
        std = rewards_G.std(correction=0)
        return centred_G / std if std > _MIN_STD else torch.zeros_like(centred_G)
    raise ValueError(f"no advantage of kind {kind!r}")
