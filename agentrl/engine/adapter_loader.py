"""Brings adapters from folders to the stack that serves them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from agentrl.engine.adapter_reader import AdapterFile, open_adapter
from agentrl.engine.lora import LoraStack, PlacedAdapter
from agentrl.engine.lora_room import LoraLayout
from agentrl.engine.peft import parse_adapter


@dataclass(frozen=True, slots=True)
class _Known:
    """An adapter that was placed, by all that the next version has in common with it."""

    config: bytes
    header: bytes
    layout: LoraLayout
    scale: float

    def is_like(self, file: AdapterFile) -> bool:
        """Whether a file differs in the values of its tensors alone."""
        return file.header == self.header and file.config == self.config


class AdapterLoader:
    """Places adapters, and knows the layout of the one that it placed last.

    The first version of an adapter is taken apart, checked and copied matrix by matrix. The file of the next one holds
    other values in the same places, so it is read straight to where it is served from: to make and match hundreds of
    tensors takes the interpreter, and copies take memory's time, from the thread that draws tokens.

    Example: of SmolLM2-135M at rank 16 (420 tensors, 20 MB) the second version takes a tenth of the first one's time.
    """

    def __init__(self, lora: LoraStack, max_rank: int) -> None:
        self._lora, self._max_rank = lora, max_rank
        self._known: _Known | None = None

    def load(self, serial: int, folder: Path) -> PlacedAdapter:
        """Read an adapter and place it, not yet served; one call at a time. Raises BadRequestError."""
        with open_adapter(folder) as file:
            known = self._known
            if known is not None and known.is_like(file) and (place := self._lora.free_place(known.layout)):
                file.fill(place.memory_E)
                return self._lora.place_filled(serial, place, known.scale)
            self._known = None
            adapter = parse_adapter(msgspec.json.decode(file.config), file.tensors(), self._max_rank)
            placed = self._lora.place(serial, adapter)
            layout = LoraLayout.of(adapter)
            # A file with bytes that no matrix has may have them in front.
            if layout is not None and adapter.num_bytes == file.size_bytes:
                self._known = _Known(file.config, file.header, layout, adapter.scale)
            return placed
