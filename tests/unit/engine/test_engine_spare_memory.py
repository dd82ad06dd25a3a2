from __future__ import annotations

import gc
import weakref

import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.spare import SpareMemory

CPU = torch.device("cpu")


def test_a_buffer_is_lent_again_once_all_that_was_served_from_it_is_replaced() -> None:
    spare = SpareMemory()
    first = spare.lend(64, CPU)
    spare.swapped(is_whole=True)
    second = spare.lend(64, CPU)
    assert second is not first
    spare.swapped(is_whole=True)
    assert spare.lend(64, CPU) is first
    assert spare.lend(64, CPU) is not second


def test_a_swap_of_some_tensors_frees_nothing_and_keeps_nothing() -> None:
    spare = SpareMemory()
    buffers = []
    for is_whole in (True, False, False, True):
        buffers.append(spare.lend(64, CPU))
        spare.swapped(is_whole)
    assert all(spare.lend(64, CPU) is not buffer for buffer in buffers)
    freed = weakref.ref(buffers[1])
    buffers.clear()
    gc.collect()
    assert freed() is None, "updates of some tensors would fill the memory one after the other"


def test_memory_that_somebody_may_still_write_is_never_lent_again() -> None:
    spare = SpareMemory()
    failed = spare.lend(64, CPU)
    spare.abandon()
    for _ in range(4):
        assert spare.lend(64, CPU) is not failed
        spare.swapped(is_whole=True)


@given(st.lists(st.tuples(st.lists(st.sampled_from([8, 16]), max_size=3), st.booleans()), max_size=12))
def test_nothing_that_is_served_or_staged_is_lent(rounds: list[tuple[list[int], bool]]) -> None:
    spare = SpareMemory()
    served: list[torch.Tensor] = []
    for sizes, is_whole in rounds:
        staged: list[torch.Tensor] = []
        for size in sizes:
            buffer = spare.lend(size, CPU)
            assert len(buffer) == size
            assert all(buffer is not other for other in served + staged)
            staged.append(buffer)
        spare.swapped(is_whole)
        served = staged if is_whole else served + staged
