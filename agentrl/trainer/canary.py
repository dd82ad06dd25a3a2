"""The canary: what the trainer says of a few tokens, for engines to repeat once they hold its weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from agentrl.trainer.model import PolicyModel, reshard_policy
from agentrl.trainer.packing import pack
from agentrl.trainer.sequence import TokenSequence
from agentrl.types.batch import Canary

_NEXT_TOKENS = 16


@torch.no_grad()
def compute_canary(policy: PolicyModel, token_ids: Sequence[int], device: str) -> Canary | None:
    """Log-probabilities at temperature 1 under the current weights: of tokens 1 to n-1, and of the likeliest to follow.

    None of less than two tokens. All ranks must call.
    """
    if len(token_ids) < 2:
        return None
    selected = np.arange(1, len(token_ids))
    unused = np.zeros(len(selected), np.float32)
    ids = np.asarray(token_ids, np.int32)
    sequence = TokenSequence(ids, selected, unused, unused, unused, unused, unused, None)
    last: list[torch.Tensor] = []
    hook = policy.network.base_model.register_forward_hook(
        lambda module, inputs, output: last.append(output.last_hidden_state[0, -1])
    )
    try:
        logprobs_S = policy(pack([sequence], device), 1.0)
        next_ids_K, next_logprobs_K = policy.likeliest(last[0], _NEXT_TOKENS)
    finally:
        hook.remove()
        reshard_policy(policy)  # whole weights are not those that the optimizer knows
    next_ids, next_logprobs = tuple(next_ids_K.tolist()), tuple(next_logprobs_K.tolist())
    return Canary(tuple(token_ids), tuple(logprobs_S.tolist()), next_ids, next_logprobs)
