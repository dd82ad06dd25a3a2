"""What a storm left: tokens that two sides have in common, and log-probabilities against a plain forward pass."""

from __future__ import annotations

from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from agentrl.types.trajectory import Trajectory

REFERENCE_ROWS = 16


def count_common(given: list[int], kept: list[int]) -> int:
    """Tokens that two sequences have in common and in order."""
    if given == kept:
        return len(given)
    blocks = SequenceMatcher(None, given, kept, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks)


@torch.no_grad()
def find_max_gap(trajectories: list[Trajectory], models: tuple[Path, Path]) -> float:
    """Largest difference to a plain forward pass under the weights that each token's span names, in nats."""
    networks = [AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval() for model in models]
    ordered = sorted(trajectories, key=lambda trajectory: len(trajectory.token_ids))
    gap = 0.0
    for start in range(0, len(ordered), REFERENCE_ROWS):
        rows = ordered[start : start + REFERENCE_ROWS]
        ids_BL = torch.zeros(len(rows), len(rows[-1].token_ids), dtype=torch.long)
        for row, trajectory in enumerate(rows):
            ids_BL[row, : len(trajectory.token_ids)] = torch.from_numpy(trajectory.token_ids)
        tables = [_logprobs(network, ids_BL) for network in networks]
        gap = max([gap, *(_gap(t, [table[row] for table in tables]) for row, t in enumerate(rows))])
    return gap


def _logprobs(network: torch.nn.Module, ids_BL: torch.Tensor) -> np.ndarray:
    """Of every token given those before it, 0 for the first; [B, L]."""
    table_BLV = network(ids_BL).logits[:, :-1].log_softmax(-1)
    picked_BL = table_BLV.gather(2, ids_BL[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(picked_BL, (1, 0)).numpy()


def _gap(trajectory: Trajectory, by_parity: list[np.ndarray]) -> float:
    gaps = [
        np.abs(trajectory.logprobs[span.start : span.end] - by_parity[span.version.step % 2][span.start : span.end])
        for span in trajectory.versions
    ]
    return max((float(gap.max()) for gap in gaps), default=0.0)
