"""Slots: rows of one KV cache, what tokens they hold, and which of them a new request can start from."""

from __future__ import annotations

import math
import mmap
import sys

import numpy as np
import torch

_GROWTH_TOKENS = 128
_LAZY_TOKENS = 8192
_MAP_NORESERVE = 0x4000  # of Linux, named by Python 3.13; without it one piece may not exceed the machine's memory


class KVCache:
    """Keys and values [slots, heads, columns, D] of each layer, which has them from its first pass on.

    Column `capacity - 1` is never part of a context: idle rows of a decode step may write there. What was never
    written is zero, since a masked column still takes part in a product, and on a CPU takes no memory. So a CPU has
    columns for the longest context at once, up to `_LAZY_TOKENS`; elsewhere, and beyond that, they grow as contexts
    do, which copies what the rows hold that were ever used.

    Example: 64 slots of SmolLM2-135M (8192 positions) reserve 24 GB of addresses, and use what their contexts fill.
    """

    def __init__(self, num_slots: int, device: str, context_length: int = 0) -> None:
        """`context_length` is that of the longest context, in tokens; 0 if it is not known."""
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self._num_slots, self._device = num_slots, device
        longest = min(context_length, _LAZY_TOKENS) if device == "cpu" else 0
        # More than the longest: rows whose distance is a power of two would share the same few lines of a cache.
        self._first_columns = longest + _GROWTH_TOKENS
        self._num_written = 0
        self.capacity = self._first_columns
        """Columns of each row."""

    def layer(self, number: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values; heads, sizes and dtype are those of new ones, [B, heads, T, D]. Raises OSError."""
        if number not in self.keys:
            for tensors, new in ((self.keys, key), (self.values, value)):
                tensors[number] = self._zeros(new.shape[1], new.shape[-1], new.dtype)
        return self.keys[number], self.values[number]

    def reserve(self, num_tokens: int, num_rows: int = 0) -> None:
        """Make room for contexts of `num_tokens` and one more column, in the first `num_rows` rows or fewer."""
        missing = num_tokens + 1 - self.capacity
        if missing > 0:
            fewest = self.capacity // 2 if self.capacity else self._first_columns
            self._grow(max(-(-missing // _GROWTH_TOKENS) * _GROWTH_TOKENS, fewest))
        self._num_written = max(self._num_written, num_rows)

    def _grow(self, extra: int) -> None:
        written, columns = self._num_written, self.capacity
        self.capacity += extra
        for tensors in (self.keys, self.values):
            for number, tensor in tensors.items():
                tensors[number] = self._zeros(tensor.shape[1], tensor.shape[3], tensor.dtype)
                tensors[number][:written, :, :columns] = tensor[:written]

    def _zeros(self, num_heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return lazy_zeros((self._num_slots, num_heads, self.capacity, size), dtype, self._device)

    @property
    def is_released(self) -> bool:
        """Whether there is no memory for KV."""
        return self.capacity == 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values; on a CPU those that were never written take no memory."""
        return sum(tensor.nbytes for tensors in (self.keys, self.values) for tensor in tensors.values())

    def release(self) -> None:
        """Free the memory of all rows."""
        for tensors in (self.keys, self.values):
            tensors.update({number: tensor[:, :, :0].clone() for number, tensor in tensors.items()})
        self.capacity = self._num_written = 0

    def resume(self) -> None:
        """Have memory again, as much as at the start."""
        self.reserve(0)

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first columns of one row to another."""
        for tensors in (self.keys, self.values):
            for tensor in tensors.values():
                tensor[target, :, :num_tokens] = tensor[source, :, :num_tokens]
        self._num_written = max(self._num_written, target + 1)


class SlotTable:
    """Which tokens' KV each slot holds, which slots are in use, and under which weights they were made.

    `origin` counts weight loads and `adapter` is the serial of a LoRA adapter: KV is reused only under the
    load and the adapter that made it, so a changed policy never attends to the cache of another, flushed or not.

    Example: slot 3 holds the 120 tokens of a finished turn. The next turn's prompt begins with these
    120, so it takes slot 3 and computes only what is new. A second episode of the same task finds its
    prompt at the start of slot 3 while that is busy, and copies the common columns to a free slot.
    """

    def __init__(self, num_slots: int) -> None:
        self.tokens = np.zeros((num_slots, _GROWTH_TOKENS), np.int32)
        self.lengths = np.zeros(num_slots, np.int64)
        self.origin = np.zeros(num_slots, np.int64)
        self.adapter = np.zeros(num_slots, np.int64)
        self._used_at = np.zeros(num_slots, np.int64)
        self._is_busy = np.zeros(num_slots, bool)
        self._clock = 0

    @property
    def num_rows(self) -> int:
        """Rows from the first to the last busy slot: what a decode step computes."""
        busy = np.flatnonzero(self._is_busy)
        return int(busy[-1]) + 1 if len(busy) else 0

    def acquire(self, ids: np.ndarray, origin: int, adapter: int = 0) -> tuple[int, int, int] | None:
        """Take a slot for a context: ``(slot, reusable tokens, slot to copy them from)``, None if all are busy.

        At least the last token of the context is left to compute, since its logits are needed.
        """
        free = np.flatnonzero(~self._is_busy)
        if not len(free):
            return None
        is_same_policy = (self.origin == origin) & (self.adapter == adapter)
        common = np.where(is_same_policy, self._common_prefix(ids), 0)
        common = np.minimum(common, len(ids) - 1)
        best = int(common.argmax())
        if not self._is_busy[best] and common[best] > 0 and common[best] >= self.lengths[best] // 2:
            slot = best
        else:
            slot = int(free[np.lexsort((free, self._used_at[free], self.lengths[free] > 0))[0]])
        reusable = int(common[best])
        self._is_busy[slot] = True
        self._touch(slot)
        self._reserve(len(ids))
        self.tokens[slot, : len(ids)] = ids
        self.lengths[slot] = reusable
        self.origin[slot] = origin
        self.adapter[slot] = adapter
        return slot, reusable, best

    def release(self, slot: int) -> None:
        """The slot's request is over; its tokens stay until another needs the slot."""
        self._is_busy[slot] = False
        self._touch(slot)

    def flush(self) -> None:
        """Forget all tokens. Only with no slot busy."""
        self.lengths[:] = 0

    def append(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Put one drawn token behind each slot's cached ones; its own KV comes with the next step."""
        self._reserve(int(self.lengths[slots].max()) + 1)
        self.tokens[slots, self.lengths[slots]] = tokens

    def _common_prefix(self, ids: np.ndarray) -> np.ndarray:
        """Leading tokens that each slot shares with a context and has KV for; [slots]."""
        width = min(len(ids), self.tokens.shape[1])
        differs = self.tokens[:, :width] != ids[:width]
        first = np.where(differs.any(1), differs.argmax(1), width)
        return np.minimum(first, self.lengths)

    def _reserve(self, num_tokens: int) -> None:
        missing = num_tokens + 1 - self.tokens.shape[1]
        if missing > 0:
            self.tokens = np.pad(self.tokens, ((0, 0), (0, max(missing, self.tokens.shape[1]))))

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._used_at[slot] = self._clock


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros; on a CPU the kernel makes them when they are first written, which `torch.zeros` does at once.

    The memory comes from the kernel itself. What the C library gives is fresh only above a limit that moves with what
    was freed before, so the same call may take microseconds or, for a KV cache that grows, a second.

    Raises:
        OSError: the process may not have so many addresses.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform != "linux":
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    else:
        memory = mmap.mmap(-1, num_bytes, flags=flags | _MAP_NORESERVE)
        # Where few bytes far apart are written, pages of 2 MiB would take all of the memory at once.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
