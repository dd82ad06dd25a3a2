"""The canary: what the trainer says of a few tokens, for engines to repeat once they hold its weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from agentrl.trainer.model import PolicyModel
from agentrl.trainer.packing import pack
from agentrl.trainer.sequence import TokenSequence
from agentrl.types.batch import Canary


@torch.no_grad()
def compute_canary(policy: PolicyModel, token_ids: Sequence[int], device: str) -> Canary | None:
    """Log-probabilities of tokens 1 to n-1 under the current weights at temperature 1; None of less than two.

    All ranks must call.
    """
    if len(token_ids) < 2:
        return None
    selected = np.arange(1, len(token_ids))
    unused = np.zeros(len(selected), np.float32)
    ids = np.asarray(token_ids, np.int32)
    sequence = TokenSequence(ids, selected, unused, unused, unused, unused, unused, None)
    logprobs_S = policy(pack([sequence], device), 1.0)
    # Without a backward pass the root keeps its weights gathered, and then they are not what the optimizer knows.
    policy.reshard()
    return Canary(tuple(token_ids), tuple(logprobs_S.tolist()))
