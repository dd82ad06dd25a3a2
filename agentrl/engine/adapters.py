"""The LoRA routes: adapters come by folder or as tensors, are used by name, and leave when nobody uses them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.engine.files import Pace, read_in_time
from agentrl.engine.lora import NO_ADAPTER, ServedAdapters
from agentrl.engine.peft import LoraAdapter, parse_adapter, read_adapter
from agentrl.engine.request import BadRequestError, field_of
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.unpickler import load_named_tensors, payload_of
from agentrl.process.threads import run_in_thread

_FROM_TENSORS = "__tensor__"


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter by its serial; `source` is its folder, or says that it came as tensors."""

    serial: int
    source: str


class AdapterService:
    """Adapters by name.

    Loading pauses nobody. An adapter that is being unloaded takes no new request; it goes when its last one
    ends. Unlike the real server this one refuses matrices that do not fit, and never loads an adapter again by
    itself once it was unloaded.
    """

    def __init__(self, lora: ServedAdapters, scheduler: Scheduler, max_rank: int) -> None:
        self._lora = lora
        self._scheduler = scheduler
        self._max_rank = max_rank
        self._loaded: dict[str, LoadedAdapter] = {}
        self._leaving: set[str] = set()
        self._lock = asyncio.Lock()
        self._serials = itertools.count(NO_ADAPTER + 1)

    def routes(self) -> dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]]:
        """POST routes by path; each takes the JSON body."""
        return {
            "/load_lora_adapter": self._load,
            "/load_lora_adapter_from_tensors": self._load_from_tensors,
            "/unload_lora_adapter": self._unload,
        }

    def sources(self) -> dict[str, str]:
        """Where each loaded adapter came from, by name."""
        return {name: adapter.source for name, adapter in self._loaded.items()}

    def serial_of(self, name: Any) -> int:
        """The adapter that a request names; none for null. Raises BadRequestError."""
        if name is None:
            return NO_ADAPTER
        if not isinstance(name, str) or name not in self._loaded:
            raise BadRequestError(f"lora_path {name!r} is not loaded; loaded: {sorted(self._loaded)}")
        if name in self._leaving:
            raise BadRequestError(f"adapter {name!r} is being unloaded")
        return self._loaded[name].serial

    async def _load(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._told_what_is_loaded():
            name, folder = field_of(body, "lora_name", str), field_of(body, "lora_path", str)
            self._check_is_new(name)
            await self._put(name, folder, lambda pace: read_adapter(Path(folder), self._max_rank, pace))
        return self._answer()

    async def _load_from_tensors(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._told_what_is_loaded():
            name, payload = field_of(body, "lora_name", str), payload_of(body)
            if body.get("load_format") is not None:
                raise BadRequestError(f"load_format {body['load_format']!r} is not served for adapters; use null")
            self._check_is_new(name)
            config = body.get("config_dict")
            await self._put(
                name, _FROM_TENSORS, lambda _pace: parse_adapter(config, load_named_tensors(payload), self._max_rank)
            )
        return self._answer()

    async def _unload(self, body: dict[str, Any]) -> dict[str, Any]:
        """Waits for: the adapter's requests. Unblocked by: their end; a pause by itself ends none but by abort."""
        with self._told_what_is_loaded():
            name = field_of(body, "lora_name", str)
            serial = self.serial_of(name)
        self._leaving.add(name)
        for request in self._scheduler.in_flight():
            if request.adapter == serial:
                await request.done.wait()
        async with self._lock:
            async with self._scheduler.between_steps():
                self._lora.remove(serial)
            self._leaving.remove(name)
            del self._loaded[name]
        return self._answer()

    async def _put(self, name: str, source: str, read: Callable[[Pace], LoraAdapter]) -> None:
        """Read and write aside, in threads while steps go on, then serve.

        Waits for: the disk, the copy, and the step under way. Unblocked by: their ends, or the disk's deadline.
        """
        serial = next(self._serials)
        async with self._lock:
            self._check_is_new(name)
            adapter = await read_in_time(f"the adapter in {source}", read)
            fitted = await run_in_thread(f"fit-{name}", lambda: self._lora.fitted(adapter))
            async with self._scheduler.between_steps():
                self._lora.put(serial, fitted)
            self._loaded[name] = LoadedAdapter(serial, source)

    def _check_is_new(self, name: str) -> None:
        if name in self._loaded:
            raise BadRequestError(f"adapter {name!r} is already loaded; unload it first")

    def _answer(self) -> dict[str, Any]:
        return {"success": True, "error_message": "", "loaded_adapters": self.sources()}

    @contextmanager
    def _told_what_is_loaded(self) -> Iterator[None]:
        """Refusals say what is loaded, as answers do."""
        try:
            yield
        except BadRequestError as error:
            message = str(error)
            raise BadRequestError(message, error_message=message, loaded_adapters=self.sources()) from error
