"""Routes that free the engine's memory for a trainer on the same device, and take it back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import torch

from agentrl.engine.request import BadRequestError
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.weights import WeightStore

_TAGS = ("kv_cache", "weights")


class MemoryRoutes:
    """Frees the KV cache and the weights, by SGLang's tags.

    Generation is refused until the KV cache was resumed and every released tensor was brought by an
    update. Resuming ``weights`` allocates nothing: an update brings memory of its own.
    """

    def __init__(self, scheduler: Scheduler, store: WeightStore) -> None:
        self._scheduler, self._store = scheduler, store
        scheduler.refusal = self._refusal

    def routes(self) -> dict[str, Callable[[dict[str, Any]], Awaitable[Any]]]:
        """POST routes by path; each takes the JSON body."""
        return {"/release_memory_occupation": self._release, "/resume_memory_occupation": self._resume}

    async def _release(self, body: dict[str, Any]) -> None:
        tags = _tags(body)
        async with self._scheduler.between_steps():
            self._release_now(tags)

    async def _resume(self, body: dict[str, Any]) -> None:
        tags = _tags(body)
        async with self._scheduler.between_steps():
            if "kv_cache" in tags:
                self._scheduler.model.cache.resume()

    def _release_now(self, tags: list[str]) -> None:
        scheduler = self._scheduler
        is_idle = not scheduler.num_running and (scheduler.pause_mode is not None or not scheduler.num_waiting)
        if not is_idle:
            raise BadRequestError("requests hold memory; wait for their end, or pause by abort or retract")
        scheduler.flush()
        if "kv_cache" in tags:
            scheduler.model.cache.release()
        if "weights" in tags:
            self._store.release()
        if self._store.device.type == "cuda":
            # Freed memory stays with this process's allocator, where no other process can have it.
            torch.cuda.empty_cache()

    def _refusal(self) -> str | None:
        if self._scheduler.model.cache.is_released:
            return "the KV cache is released; call resume_memory_occupation first"
        if self._store.missing:
            num_missing = len(self._store.missing)
            return f"the memory of {num_missing} weights was released; update all weights first"
        return None


def _tags(body: dict[str, Any]) -> list[str]:
    tags = body.get("tags")
    if tags is None:
        return list(_TAGS)
    if not isinstance(tags, list) or not set(map(str, tags)) <= set(_TAGS):
        raise BadRequestError(f"tags must be some of {list(_TAGS)}, got {tags!r}")
    return tags
