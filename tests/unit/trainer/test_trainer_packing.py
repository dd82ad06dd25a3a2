from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.trainer.attention import attend
from agentrl.trainer.packing import deal, pack
from agentrl.trainer.sequence import TokenSequence
from agentrl.types.generation import KeptTokens

LENGTHS = st.lists(st.integers(1, 60), max_size=25)


def sequence(token_ids: list[int], selected: list[int], kept: list[list[int]] | None = None) -> TokenSequence:
    count = len(selected)
    return TokenSequence(
        token_ids=np.asarray(token_ids, np.int32),
        selected=np.asarray(selected, np.int64),
        logprobs=-np.arange(count, dtype=np.float32),
        advantages=np.full(count, 0.5, np.float32),
        scales=np.full(count, 0.25, np.float32),
        turns=np.arange(count, dtype=np.int16),
        staleness=np.full(count, 2, np.int32),
        kept_tokens=None if kept is None else KeptTokens.from_lists(kept),
    )


@given(LENGTHS, st.integers(1, 4), st.integers(1, 100))
def test_every_sequence_is_dealt_exactly_once(lengths, num_ranks, budget):
    ranks = deal(lengths, num_ranks, budget)
    dealt = [index for rank in ranks for batch in rank for index in batch]
    assert sorted(dealt) == list(range(len(lengths)))
    assert len(ranks) == num_ranks


@given(LENGTHS, st.integers(1, 4), st.integers(1, 100))
def test_no_micro_batch_of_several_sequences_exceeds_the_budget(lengths, num_ranks, budget):
    for batch in itertools.chain.from_iterable(deal(lengths, num_ranks, budget)):
        assert len(batch) <= 1 or sum(lengths[i] for i in batch) <= budget


@given(LENGTHS, st.integers(1, 4), st.integers(1, 100))
def test_all_ranks_get_the_same_number_of_micro_batches(lengths, num_ranks, budget):
    assert len({len(rank) for rank in deal(lengths, num_ranks, budget)}) == 1


@given(LENGTHS, st.integers(1, 4), st.integers(1, 100))
def test_attention_computes_at_most_twice_the_budget(lengths, num_ranks, budget):
    for batch in itertools.chain.from_iterable(deal(lengths, num_ranks, budget)):
        assert len(batch) <= 1 or len(batch) * max(lengths[i] for i in batch) <= 2 * budget


@given(LENGTHS, st.integers(1, 4))
def test_no_rank_carries_more_than_one_micro_batch_above_the_least(lengths, num_ranks):
    ranks = deal(lengths, num_ranks, 64)
    loads = [sum(lengths[i] for batch in rank for i in batch) for rank in ranks]
    largest = max((sum(lengths[i] for i in batch) for rank in ranks for batch in rank), default=0)
    assert max(loads) - min(loads) <= largest


def test_a_sequence_above_the_budget_goes_alone():
    assert deal([100, 3, 3], 1, 10) == [[[0], [1, 2]]]


def test_the_deal_by_hand():
    assert deal([5, 3, 4, 4], 2, 8) == [[[2, 3], []], [[0], [1]]]


def test_small_work_is_spread_over_the_ranks():
    ranks = deal([4, 4, 4, 4], 2, 1000)
    assert [sum(len(batch) for batch in rank) for rank in ranks] == [2, 2]


def test_a_packed_row_has_no_padding_and_positions_start_over():
    batch = pack([sequence([5, 6, 7], [1, 2]), sequence([8, 9], [1])], "cpu")
    assert batch.num_tokens == 5
    assert batch.input_ids_T.tolist() == [5, 6, 7, 8, 9]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 0, 1]
    assert batch.sources_S.tolist() == [0, 1, 3]
    assert batch.targets_S.tolist() == [6, 7, 9]
    assert batch.sequences_S.tolist() == [0, 0, 1]
    assert batch.behaviour_S.tolist() == [0, -1, 0]
    assert batch.turns_S.tolist() == [0, 1, 0]
    assert batch.advantages_S.tolist() == [0.5] * 3
    assert batch.scales_S.tolist() == [0.25] * 3
    assert batch.staleness_S.tolist() == [2] * 3
    assert batch.kept is None


def test_kept_sets_of_a_row_follow_its_targets():
    rows = [sequence([5, 6, 7], [1, 2], [[6, 1], [7]]), sequence([8, 9], [1], [[9, 2, 3]])]
    ids, offsets = pack(rows, "cpu").kept
    assert ids.tolist() == [6, 1, 7, 9, 2, 3]
    assert offsets.tolist() == [0, 2, 3, 6]


def test_kept_sets_that_only_some_sequences_have_are_refused():
    with pytest.raises(ValueError, match="1 of 2 sequences"):
        pack([sequence([5, 6], [1], [[6]]), sequence([8, 9], [1])], "cpu")


def test_a_row_of_nothing_is_one_token_outside_the_loss():
    batch = pack([], "cpu")
    assert batch.num_tokens == 1
    assert all(len(c) == 0 for c in (batch.sources_S, batch.targets_S, batch.advantages_S, batch.sequences_S))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_unpacking_a_row_and_packing_it_again_changes_nothing(lengths):
    layout = pack([sequence([100 * i + k for k in range(n)], []) for i, n in enumerate(lengths)], "cpu").layout
    row = torch.arange(100, 100 + sum(lengths))
    table = row[layout.gather_NL]
    assert table.shape == (len(lengths), max(lengths))
    assert table.flatten()[layout.scatter_T].tolist() == row.tolist()
    starts = itertools.accumulate([0, *lengths[:-1]])
    assert [r[:n].tolist() for r, n in zip(table, lengths, strict=True)] == [
        row[s : s + n].tolist() for s, n in zip(starts, lengths, strict=True)
    ]


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_packed_attention_equals_a_naive_loop_over_sequences(key_heads):
    lengths, heads, width = [3, 1, 5], 4, 6
    layout = pack([sequence([100 * i + k for k in range(n)], []) for i, n in enumerate(lengths)], "cpu").layout
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, 9, width, generator=generator)
    key, value = (torch.randn(1, key_heads, 9, width, generator=generator) for _ in range(2))
    output, _ = attend(torch.nn.Module(), query, key, value, None, layout, scaling=0.3)
    assert output.shape == (1, 9, heads, width)
    for start, stop in [(0, 3), (3, 4), (4, 9)]:
        for head, at in itertools.product(range(heads), range(start, stop)):
            source = head * key_heads // heads
            scores = torch.stack([query[0, head, at] @ key[0, source, j] * 0.3 for j in range(start, at + 1)])
            right = scores.softmax(0) @ value[0, source, start : at + 1]
            torch.testing.assert_close(output[0, at, head], right, rtol=1e-5, atol=1e-6)


def test_a_common_prefix_is_in_the_row_once_by_hand():
    batch = pack([sequence([5, 6, 7], [1, 2]), sequence([5, 8], [1]), sequence([5, 6, 7], [2])], "cpu")
    assert batch.input_ids_T.tolist() == [5, 6, 7, 8]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 1]
    assert batch.layout.gather_NL.tolist() == [[0, 1, 2], [0, 3, 0], [0, 1, 2]]
    assert batch.sources_S.tolist() == [0, 1, 0, 1]
    assert batch.targets_S.tolist() == [6, 7, 8, 7]
    assert batch.sequences_S.tolist() == [0, 0, 1, 2]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12))
def test_a_row_has_a_token_for_every_node_of_the_tree_of_prefixes(ids):
    batch = pack([sequence(row, list(range(1, len(row)))) for row in ids], "cpu")
    prefixes = {tuple(row[: n + 1]) for row in ids for n in range(len(row))}
    assert batch.num_tokens == len(prefixes)
    table = batch.input_ids_T[batch.layout.gather_NL]
    assert [line[: len(row)].tolist() for line, row in zip(table, ids, strict=True)] == ids
    positions = batch.position_ids_T[batch.layout.gather_NL]
    assert [line[: len(row)].tolist() for line, row in zip(positions, ids, strict=True)] == [
        list(range(len(row))) for row in ids
    ]
    assert batch.targets_S.tolist() == [token for row in ids for token in row[1:]]
    assert batch.input_ids_T[batch.sources_S].tolist() == [token for row in ids for token in row[:-1]]
    chosen = batch.layout.gather_NL.flatten()[batch.layout.scatter_T]
    assert chosen.tolist() == list(range(batch.num_tokens)), "each token is taken from a sequence that has it"


def test_tokens_with_other_experts_are_not_the_same():
    def routed(experts: list[int] | None) -> TokenSequence:
        column = None if experts is None else np.asarray(experts, np.int16)[:, None, None]
        return dataclasses.replace(sequence([5, 6, 7], [2]), routed_experts=column)

    batch = pack([routed([0, 1, 1]), routed([0, 1, 2]), routed([0, 2, 2]), routed(None)], "cpu")
    assert batch.num_tokens == 9
    experts = torch.cat([batch.layout.experts_TK[0], torch.tensor([[-1]])])
    table = experts[batch.layout.gather_NL][..., 0]
    assert table.tolist() == [[0, 1, 1], [0, 1, 2], [0, 2, 2], [-1, -1, -1]]
