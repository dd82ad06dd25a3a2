"""Packs trajectories into micro-batches without padding and deals them to ranks.

**Shared prefixes are computed once.** Episodes of one environment begin with the same instructions, those of a group
with the same question, branches of an episode with the same turns. In a micro-batch such a prefix has one place in
the row, to which every sequence with it points: causal attention gives its tokens the same states whatever comes
behind, and their gradients add up there. With 230 tokens of prompt and 130 behind it, a row of 22 sequences has 3,100
tokens instead of 7,900. Attention itself still reads the prefix for each sequence. On a GPU the gradients of a shared
prefix are added in no fixed order, so that a step done again may differ there in the last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from agentrl.trainer.sequence import TokenSequence
from agentrl.types.generation import KeptTokens
from agentrl.types.trajectory import NOT_ROUTED

_MAX_PADDED_RATIO = 2


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """What the layers of a model must know of a packed row of T tokens; travels down the forward pass.

    Where its N sequences lie, for attention that must not mix them; and the K experts that each token is to
    use in each layer, for routers that replay them.

    Example: sequences [5, 6, 7] and [5, 8] make the row [5, 6, 7, 8], with gather ``[[0, 1, 2], [0, 3, 0]]`` and
    scatter ``[3, 1, 2, 4]``.
    """

    gather_NL: torch.Tensor  # [N, longest] int64: index into the row; padding points at 0
    scatter_T: torch.Tensor  # [T] int64: index into the flattened [N * longest], of one of the sequences that have it
    experts_TK: tuple[torch.Tensor, ...] | None = None  # per layer, [T, K] int64, -1 where the router chooses


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """N sequences in one row: T tokens, since common prefixes are there once, and S targets that enter the loss.

    Example: sequences of 3 and 2 tokens that begin with different ones give ``position_ids [0, 1, 2, 0, 1]``.
    """

    input_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    layout: PackedLayout
    sources_S: torch.Tensor  # position whose hidden state predicts the token: one before it
    targets_S: torch.Tensor
    behaviour_S: torch.Tensor
    advantages_S: torch.Tensor
    scales_S: torch.Tensor
    turns_S: torch.Tensor
    sequences_S: torch.Tensor
    staleness_S: torch.Tensor
    kept: tuple[torch.Tensor, torch.Tensor] | None
    teacher_S: torch.Tensor | None = None  # NaN for sequences without; None where no sequence has any

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids_T)

    def without_replay(self) -> MicroBatch:
        """The batch as a trainer sees it that knows neither the engine's experts nor its kept sets."""
        return replace(self, layout=replace(self.layout, experts_TK=None), kept=None)


def deal(lengths: Sequence[int], num_ranks: int, budget_tokens: int) -> list[list[list[int]]]:
    """Indices of sequences by rank and micro-batch.

    Sequences of like length go together, so that attention wastes little; every rank gets the same
    number of micro-batches (empty ones where there is nothing left), because ranks must meet in every
    forward and backward pass. A sequence longer than the budget gets a micro-batch of its own.

    Example: lengths ``[5, 3, 4, 4]``, 2 ranks, budget 8 give ``[[[2, 3], []], [[0], [1]]]``.
    """
    total = sum(lengths)
    budget = min(budget_tokens, max(-(-total // num_ranks), 1))
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    size = 0
    for index in order:
        longest = lengths[batches[-1][0]] if batches else 0
        fits = batches and size + lengths[index] <= budget
        is_dense = batches and longest * (len(batches[-1]) + 1) <= _MAX_PADDED_RATIO * budget
        if not (fits and is_dense):
            batches.append([])
            size = 0
        batches[-1].append(index)
        size += lengths[index]
    return _balance(batches, lengths, num_ranks)


def _balance(batches: list[list[int]], lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Give each next largest micro-batch to the rank with the least to do, then even out the counts."""
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for batch in sorted(batches, key=lambda b: -sum(lengths[i] for i in b)):
        rank = loads.index(min(loads))
        ranks[rank].append(batch)
        loads[rank] += sum(lengths[i] for i in batch)
    most = max(len(rank) for rank in ranks)
    return [rank + [[] for _ in range(most - len(rank))] for rank in ranks]


def pack(sequences: Sequence[TokenSequence], device: str) -> MicroBatch:
    """One micro-batch of the sequences; of none, a single token that enters no loss."""
    if not sequences:
        sequences = [_nothing()]
    places = _share_prefixes(sequences)
    num_tokens = 1 + max(int(place[-1]) for place in places)
    token_ids, positions = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64)
    for sequence, place in zip(sequences, places, strict=True):
        token_ids[place], positions[place] = sequence.token_ids, np.arange(len(place))
    pairs = list(zip(sequences, places, strict=True))
    sources = np.concatenate([place[s.selected - 1] for s, place in pairs])
    targets = np.concatenate([s.token_ids[s.selected] for s in sequences]).astype(np.int64)
    counts = [len(s.selected) for s in sequences]

    def column(name: str, dtype: type) -> torch.Tensor:
        values = np.concatenate([getattr(s, name) for s in sequences])
        return torch.from_numpy(values.astype(dtype)).to(device)

    return MicroBatch(
        input_ids_T=torch.from_numpy(token_ids).to(device),
        position_ids_T=torch.from_numpy(positions).to(device),
        layout=_layout(places, num_tokens, _experts(sequences, places, num_tokens, device), device),
        sources_S=torch.from_numpy(sources).to(device),
        targets_S=torch.from_numpy(targets).to(device),
        behaviour_S=column("logprobs", np.float32),
        advantages_S=column("advantages", np.float32),
        scales_S=column("scales", np.float32),
        turns_S=column("turns", np.int64),
        sequences_S=torch.from_numpy(np.repeat(np.arange(len(sequences)), counts)).to(device),
        staleness_S=column("staleness", np.int64),
        kept=_kept(sequences, device),
        teacher_S=_teacher(sequences, device),
    )


def _share_prefixes(sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
    """Place in the row of every token of each sequence, [L] int64.

    In the order of their tokens, each sequence has its longest common prefix with the one before it, so that the row
    has no more tokens than the tree of all prefixes has nodes. Tokens whose experts are on record are the same only
    if these are; there a prefix may be computed more than once.
    """
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].token_ids.astype(">i4").tobytes())
    places: list[np.ndarray] = [np.zeros(0, np.int64)] * len(sequences)
    num_tokens, last = 0, None
    for index in order:
        length = len(sequences[index].token_ids)
        shared = 0 if last is None else _common_prefix(sequences[last], sequences[index])
        begin = places[last][:shared] if last is not None else places[index]
        places[index] = np.concatenate([begin, np.arange(num_tokens, num_tokens + length - shared)])
        num_tokens, last = num_tokens + length - shared, index
    return places


def _common_prefix(one: TokenSequence, other: TokenSequence) -> int:
    """How many first tokens two sequences have in common, with the same experts."""
    length = min(len(one.token_ids), len(other.token_ids))
    is_equal = one.token_ids[:length] == other.token_ids[:length]
    if (one.routed_experts is None) != (other.routed_experts is None):
        return 0
    if one.routed_experts is not None and other.routed_experts is not None:
        is_equal &= (one.routed_experts[:length] == other.routed_experts[:length]).all((1, 2))
    return length if is_equal.all() else int(is_equal.argmin())


def _layout(
    places: Sequence[np.ndarray], num_tokens: int, experts_TK: tuple[torch.Tensor, ...] | None, device: str
) -> PackedLayout:
    longest = max(len(place) for place in places)
    gather = np.zeros((len(places), longest), np.int64)
    scatter = np.zeros(num_tokens, np.int64)
    for number, place in enumerate(places):
        gather[number, : len(place)] = place
        scatter[place] = number * longest + np.arange(len(place))
    return PackedLayout(torch.from_numpy(gather).to(device), torch.from_numpy(scatter).to(device), experts_TK)


def _experts(
    sequences: Sequence[TokenSequence], places: Sequence[np.ndarray], num_tokens: int, device: str
) -> tuple[torch.Tensor, ...] | None:
    """The experts of each token of the row, layer by layer; tokens without a record leave it to the router."""
    known = [(s.routed_experts, p) for s, p in zip(sequences, places, strict=True) if s.routed_experts is not None]
    if not known:
        return None
    rows_TLK = np.full((num_tokens, *known[0][0].shape[1:]), NOT_ROUTED, np.int16)
    for experts, place in known:
        rows_TLK[place] = experts
    layers_LTK = np.ascontiguousarray(rows_TLK.transpose(1, 0, 2)).astype(np.int64)
    return torch.from_numpy(layers_LTK).to(device).unbind(0)


def _kept(sequences: Sequence[TokenSequence], device: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    parts = [s.kept_tokens for s in sequences if s.kept_tokens is not None]
    if not parts:
        return None
    if len(parts) != len(sequences):
        raise ValueError(
            f"kept sets are known for {len(parts)} of {len(sequences)} sequences; they belong to all or none"
        )
    kept = KeptTokens.concatenate(parts)
    return torch.from_numpy(kept.ids.astype(np.int64)).to(device), torch.from_numpy(kept.offsets).to(device)


def _teacher(sequences: Sequence[TokenSequence], device: str) -> torch.Tensor | None:
    if all(s.teacher_logprobs is None for s in sequences):
        return None
    columns = [
        np.full(len(s.selected), np.nan) if s.teacher_logprobs is None else s.teacher_logprobs for s in sequences
    ]
    return torch.from_numpy(np.concatenate(columns).astype(np.float32)).to(device)


def _nothing() -> TokenSequence:
    none = np.zeros(0, np.float32)
    return TokenSequence(np.zeros(1, np.int32), np.zeros(0, np.int64), none, none, none, none, none, None)
