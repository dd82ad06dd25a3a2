"""A mixture of experts computed one token and one expert at a time, and sequences with made-up routing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from trainer_reference import make_trajectory, plain_logprobs
from transformers import PreTrainedModel

from agentrl.trainer.sequence import TokenSequence, supervised_sequence

NUM_EXPERTS = 8


def random_experts(rng: np.random.Generator, num_tokens: int, unknown: float = 0.0) -> np.ndarray:
    """[num_tokens, 2 layers, 2 choices] without repetition; the last row, and some others, unknown."""
    draws = [rng.choice(NUM_EXPERTS, 2, replace=False) for _ in range(2 * num_tokens)]
    rows = np.asarray(draws, np.int16).reshape(num_tokens, 2, 2)
    rows[rng.random(num_tokens) < unknown] = -1
    rows[-1] = -1
    return rows


def routed_sequences(network: PreTrainedModel, count: int = 4, unknown: float = 0.0) -> list[TokenSequence]:
    """Sequences to be made likelier, each with experts that no router would choose."""
    rng = np.random.default_rng(7)
    sequences = [supervised_sequence(make_trajectory(network, rng)) for _ in range(count)]
    return [replace(s, routed_experts=random_experts(rng, len(s.token_ids), unknown)) for s in sequences]


def naive_mixture(block: torch.nn.Module, hidden_TH: torch.Tensor, experts_TK: np.ndarray) -> torch.Tensor:
    """The block of Qwen3-MoE, with given experts where they are known."""
    rows = []
    for hidden_H, known in zip(hidden_TH, experts_TK.tolist(), strict=True):
        probabilities = (block.gate.weight @ hidden_H).softmax(0)
        chosen = known if known[0] >= 0 else probabilities.topk(2).indices.tolist()
        total = sum(probabilities[e] for e in chosen)
        row = torch.zeros_like(hidden_H)
        for e in chosen:
            gate, up = (block.experts.gate_up_proj[e] @ hidden_H).chunk(2)
            output = block.experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up)
            row = row + probabilities[e] / total * output
        rows.append(row)
    return torch.stack(rows)


@contextlib.contextmanager
def routed_by(network: PreTrainedModel, experts: np.ndarray) -> Iterator[None]:
    """A plain network whose blocks are the naive mixture with these experts, for one sequence alone."""
    blocks = [layer.mlp for layer in network.model.layers]
    plain = [block.forward for block in blocks]
    for number, block in enumerate(blocks):
        rows = experts[:, number]
        block.forward = lambda hidden, b=block, r=rows: naive_mixture(b, hidden[0], r)[None]
    try:
        yield
    finally:
        for block, forward in zip(blocks, plain, strict=True):
            block.forward = forward


def naive_logprobs(network: PreTrainedModel, sequences: Sequence[TokenSequence]) -> torch.Tensor:
    """Log-probabilities of all selected tokens under the recorded experts, one sequence behind the other."""
    parts = []
    for sequence in sequences:
        with routed_by(network, sequence.routed_experts):
            parts.append(plain_logprobs(network, sequence.token_ids, sequence.selected))
    return torch.cat(parts)


def live_experts(network: PreTrainedModel, token_ids: np.ndarray) -> np.ndarray:
    """[T, layers, top_k]: what the routers of a plain network choose for one sequence."""
    seen: list[torch.Tensor] = []
    routers = [layer.mlp.gate for layer in network.model.layers]
    hooks = [router.register_forward_hook(lambda _m, _a, output: seen.append(output[2])) for router in routers]
    with torch.no_grad():
        network(torch.from_numpy(token_ids.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).numpy().astype(np.int16)
