from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.engine.slots import KVCache, SlotTable


def _ids(*tokens: int) -> np.ndarray:
    return np.asarray(tokens, np.int32)


def _cache(num_layers: int, num_slots: int, num_heads: int, size: int, context_length: int = 0) -> KVCache:
    cache = KVCache(num_slots, "cpu", context_length)
    for layer in range(num_layers):
        cache.layer(layer, *[torch.zeros(1, num_heads, 1, size)] * 2)
    return cache


def _fill(table: SlotTable, ids: np.ndarray, origin: int = 0) -> int:
    """Take a slot, pretend that all its KV was computed."""
    taken = table.acquire(ids, origin)
    assert taken is not None
    table.lengths[taken[0]] = len(ids)
    return taken[0]


def test_a_finished_turn_is_continued_in_its_own_slot() -> None:
    table = SlotTable(3)
    slot = _fill(table, _ids(5, 6, 7, 8))
    table.release(slot)
    assert table.acquire(_ids(5, 6, 7, 8, 9, 10), 0) == (slot, 4, slot)


def test_the_last_token_of_a_context_is_always_left_to_compute() -> None:
    table = SlotTable(2)
    slot = _fill(table, _ids(5, 6, 7, 8))
    table.release(slot)
    assert table.acquire(_ids(5, 6, 7, 8), 0) == (slot, 3, slot)
    table.release(slot)
    assert table.acquire(_ids(5), 0)[1] == 0


def test_the_prefix_of_a_busy_slot_is_copied_to_a_free_one() -> None:
    table = SlotTable(2)
    busy = _fill(table, _ids(5, 6, 7, 8))
    slot, reusable, source = table.acquire(_ids(5, 6, 9), 0)
    assert (reusable, source) == (2, busy)
    assert slot != busy


def test_a_short_common_prefix_does_not_cost_a_long_slot_its_tokens() -> None:
    table = SlotTable(2)
    long = _fill(table, np.arange(20, 60, dtype=np.int32))
    table.release(long)
    slot, reusable, source = table.acquire(_ids(20, 21, 99, 98), 0)
    assert (reusable, source) == (2, long)
    assert slot != long


@pytest.mark.parametrize(("origin", "adapter"), [(1, 1), (0, 2), (0, 0)])
def test_nothing_is_reused_across_a_change_of_weights_or_adapter(origin: int, adapter: int) -> None:
    table = SlotTable(2)
    slot = table.acquire(_ids(5, 6, 7, 8), 0, 1)[0]
    table.lengths[slot] = 4
    table.release(slot)
    assert table.acquire(_ids(5, 6, 7, 8, 9), origin, adapter)[1] == 0
    assert table.acquire(_ids(5, 6, 7, 8, 9), 0, 1) == (slot, 4, slot)


def test_flushing_forgets_everything() -> None:
    table = SlotTable(1)
    slot = _fill(table, _ids(5, 6, 7, 8))
    table.release(slot)
    table.flush()
    assert table.acquire(_ids(5, 6, 7, 8, 9), 0)[1] == 0


def test_no_slot_is_given_while_all_are_busy() -> None:
    table = SlotTable(2)
    first = _fill(table, _ids(5))
    _fill(table, _ids(6))
    assert table.num_rows == 2
    assert table.acquire(_ids(5, 6), 0) is None
    table.release(first)
    assert table.num_rows == 2
    assert table.acquire(_ids(9), 0)[0] == first


def test_of_equal_slots_the_empty_and_then_the_longest_unused_is_taken() -> None:
    table = SlotTable(3)
    slots = [_fill(table, _ids(10 * n)) for n in range(1, 3)]
    for slot in reversed(slots):
        table.release(slot)
    empty = _fill(table, _ids(99))
    assert empty not in slots
    assert table.acquire(_ids(98), 0)[0] == slots[1]


def test_drawn_tokens_count_once_their_kv_is_there() -> None:
    table = SlotTable(1)
    slot = _fill(table, _ids(5, 6))
    table.append(np.asarray([slot]), _ids(7))
    table.release(slot)
    assert table.acquire(_ids(5, 6, 7, 8), 0)[1] == 2


def test_the_table_grows_with_its_contexts() -> None:
    table = SlotTable(1)
    ids = np.arange(1000, dtype=np.int32)
    slot = _fill(table, ids)
    table.append(np.asarray([slot]), _ids(7))
    table.release(slot)
    assert table.acquire(np.append(ids, 5).astype(np.int32), 0)[1] == 1000


def test_the_cache_grows_without_losing_what_it_holds() -> None:
    cache = _cache(2, 3, 1, 4)
    cache.reserve(5, 3)
    cache.keys[1][2, :, :5] = 7.0
    cache.reserve(cache.capacity, 1)
    assert cache.capacity > 128
    assert cache.keys[0].shape == cache.values[1].shape == (3, 1, cache.capacity, 4)
    cache.copy_prefix(2, 0, 3)
    assert cache.keys[1][0, 0, :, 0].nonzero().flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_was_never_written_is_zero_and_a_copied_row_grows_too(dtype: torch.dtype) -> None:
    cache = KVCache(4, "cpu")
    cache.layer(0, torch.zeros(1, 2, 1, 4, dtype=dtype), torch.zeros(1, 2, 1, 6, dtype=dtype))
    cache.reserve(9, 1)
    for columns in (cache.keys, cache.values):
        columns[0][0, :, :9] = 3.0
    cache.copy_prefix(0, 2, 4)
    cache.reserve(200, 1)
    for columns in (cache.keys, cache.values):
        assert columns[0].dtype is dtype
        held = columns[0].count_nonzero(dim=(1, 2, 3)).tolist()
        size = columns[0].shape[-1]
        assert held == [2 * 9 * size, 0, 2 * 4 * size, 0]


def test_a_cache_that_grows_takes_memory_for_the_rows_in_use_only() -> None:
    cache = _cache(4, 256, 4, 64)
    before = _resident_bytes()
    for length in range(100, 1500, 100):
        cache.reserve(length, 1)
        cache.keys[0][0, :, :length] = 1.0
    assert cache.num_bytes > 2**30
    assert _resident_bytes() - before < 2**28


def test_on_a_cpu_nothing_is_copied_as_contexts_grow_up_to_the_longest() -> None:
    before = _resident_bytes()
    cache = _cache(4, 256, 4, 64, context_length=4000)
    keys = list(cache.keys.values())
    for length in range(100, 4001, 100):
        cache.reserve(length, 256)
        cache.keys[0][:2, :, :length] = 1.0
    assert all(now is then for now, then in zip(cache.keys.values(), keys, strict=True))
    assert _resident_bytes() - before < 2**28
    cache.release()
    cache.resume()
    assert cache.capacity > 4000
    assert not cache.keys[0][:2].any()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
