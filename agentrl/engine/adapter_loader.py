"""Brings adapters from folders to the stack that serves them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agentrl.engine.adapter_file import open_adapter
from agentrl.engine.adapter_filler import FILL_S, FillerProcess
from agentrl.engine.adapter_reader import read_tensors
from agentrl.engine.lora import FreePlace, LoraStack, PlacedAdapter
from agentrl.engine.lora_room import LoraLayout, LoraRoom
from agentrl.engine.peft import parse_adapter
from agentrl.engine.request import BadRequestError
from agentrl.process.remote import ProcessDiedError
from agentrl.process.threads import run_in_thread

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
    """An adapter that was placed, by all that the next version has in common with it."""

    config: bytes
    header: bytes
    layout: LoraLayout
    scale: float


@dataclass(frozen=True, slots=True)
class _Filler:
    """A process, and the memory that it was started for."""

    process: FillerProcess
    room: LoraRoom


class AdapterLoader:
    """Places adapters, and knows the layout of the one that it placed last.

    The first version of an adapter is taken apart, checked and copied matrix by matrix. The file of the next one holds
    other values in the same places, so another process reads it straight to where it is served from: to make and match
    hundreds of tensors takes the interpreter, and copies take memory's time, from the thread that draws tokens.

    Example: of SmolLM2-135M at rank 16 (420 tensors, 20 MB) a version takes a tenth of the first one's time from the
    third on; with the second the process is started.
    """

    def __init__(self, lora: LoraStack, max_rank: int, fill_s: float = FILL_S) -> None:
        """A disk that does not answer for `fill_s` seconds is given up."""
        self._lora, self._max_rank, self._fill_s = lora, max_rank, fill_s
        self._known: _Known | None = None
        self._filler: _Filler | None = None

    @property
    def filler_pid(self) -> int | None:
        """Process id of what reads later versions; None before the second."""
        return None if self._filler is None else self._filler.process.pid

    async def load(self, serial: int, folder: Path) -> PlacedAdapter:
        """Read an adapter and place it, not yet served; one call at a time.

        Waits for: the folder's disk. Unblocked by: it, or a deadline.

        Raises:
            BadRequestError: it cannot be read, is none, or does not fit the model.
        """
        known = self._known
        free = None if known is None else self._lora.free_place(known.layout)
        if known is not None and free is not None and await self._fill(known, free, folder):
            return self._lora.place_filled(serial, free, known.scale)
        self.close()  # what it can read is of another kind
        return await run_in_thread(f"load-{folder.name}", lambda: self._take_apart(serial, folder))

    def close(self) -> None:
        """End the process that reads; safe to call twice."""
        filler, self._filler = self._filler, None
        if filler is not None:
            filler.process.kill()

    async def _fill(self, known: _Known, free: FreePlace, folder: Path) -> bool:
        """Whether another process has read the adapter to its place."""
        size = free.room.place_bytes
        try:
            process = await self._process_for(known, free.room)
        except (OSError, ProcessDiedError) as error:
            _log.warning("no process reads adapters: %s; the one in %s is read by the engine itself", error, folder)
            return False
        try:
            return await process.fill(folder, free.place * size, size)
        except TimeoutError:
            self.close()
            self._lora.lose(free)  # what the disk has held back may still come there
            raise BadRequestError(f"the adapter in {folder} cannot be read: its disk does not answer") from None
        except ProcessDiedError as error:
            _log.warning("%s; the adapter in %s is read by the engine itself", error, folder)
            return False

    async def _process_for(self, known: _Known, room: LoraRoom) -> FillerProcess:
        filler = self._filler
        if filler is None or filler.room is not room:
            self.close()
            assert room.descriptor is not None
            num_bytes = room.num_places * room.place_bytes
            process = await FillerProcess.start(room.descriptor, num_bytes, known.config, known.header, self._fill_s)
            filler = self._filler = _Filler(process, room)
        return filler.process

    def _take_apart(self, serial: int, folder: Path) -> PlacedAdapter:
        with open_adapter(folder) as file:
            self._known = None
            adapter = parse_adapter(msgspec.json.decode(file.config), read_tensors(file), self._max_rank)
            placed = self._lora.place(serial, adapter)
            layout = LoraLayout.of(adapter)
            # A file with bytes that no matrix has may have them in front.
            if layout is not None and adapter.num_bytes == file.size_bytes:
                self._known = _Known(file.config, file.header, layout, adapter.scale)
            return placed
