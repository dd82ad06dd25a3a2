"""Memory of weights that are no longer served, for those that come next."""

from __future__ import annotations

import torch


class SpareMemory:
    """Buffers that buckets are received into, by size: fresh memory costs the kernel more time than the bytes' way.

    A publication needs a second copy of the weights for a while, so keeping that copy costs no more than the
    largest moment did. Only CPU memory is kept; CUDA's allocator does the same.

    Invariant: a buffer is lent again only after a swap that replaced every tensor that was served from it.
    """

    def __init__(self) -> None:
        self._spare: dict[int, list[torch.Tensor]] = {}
        self._staged: list[torch.Tensor] = []
        self._served: list[torch.Tensor] = []

    def lend(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """A row of bytes that nobody reads."""
        if device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        spare = self._spare.get(num_bytes)
        buffer = spare.pop() if spare else torch.empty(num_bytes, dtype=torch.uint8)
        self._staged.append(buffer)
        return buffer

    def abandon(self) -> None:
        """What was lent and is not served will not be, or somebody may still write into it: never lend it again."""
        self._staged = []

    def swapped(self, is_whole: bool) -> None:
        """What was lent is served now; if it is all of the model, what was served before is free.

        After a swap of some tensors nobody knows which buffers are still read: they are freed as others are.
        """
        self._spare = {}
        if is_whole:
            for buffer in self._served:
                self._spare.setdefault(len(buffer), []).append(buffer)
        self._served = self._staged if is_whole else []
        self._staged = []

    def clear(self) -> None:
        """Keep nothing."""
        self._spare, self._staged, self._served = {}, [], []
