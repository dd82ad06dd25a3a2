"""Transport by collective broadcast: buckets of staged weights go to an engine's ranks by gloo or NCCL.

Every engine has a group of its own with a sender process of its own. A sick engine therefore holds no
healthy one, no two engines share a pause, and a broadcast that hangs is abandoned by killing its sender.
The price is one copy on the wire for each engine, where one group of all would send a tree.

The trainer's ranks gather the weights parameter by parameter, once for all engines, and rank 0 writes one to a file
while the next is gathered; the sender maps the file, and flattens the next bucket while one is sent. So no rank waits
for a broadcast, and none holds more than a few parameters.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.process.ports import free_port
from agentrl.protocols import Engine
from agentrl.types.batch import WeightsManifest
from agentrl.types.errors import EngineError
from agentrl.weights.ahead import AheadEngines
from agentrl.weights.buckets import Bucket
from agentrl.weights.config import BroadcastTransportConfig
from agentrl.weights.sender import SenderProcess
from agentrl.weights.session import weight_update

_LAYOUT = "flattened_bucket"
_numbers = itertools.count()


@dataclass(slots=True)
class _Link:
    """A sender and the group that it forms with one engine."""

    sender: SenderProcess
    group: str
    buckets: list[Bucket] = field(default_factory=list)


class BroadcastTransport:
    """Sends buckets while the engine generates, if it can take them so, else in its pause; groups stay."""

    def __init__(self, config: BroadcastTransportConfig, load_s: float, in_place: bool, logs: Path) -> None:
        self._config, self._load_s, self._in_place, self._logs = config, load_s, in_place, logs
        self._links: dict[str, _Link] = {}
        self._ahead = AheadEngines(in_place)
        self.sent_bytes = 0

    async def needs_pause(self, engine: Engine) -> bool:
        """Not for weights in place that the engine has taken ahead. Raises EngineError."""
        return await self._ahead.needs_pause(engine)

    async def prepare(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Form the group if there is none, and map the staged weights; to our engines, send them too.

        Raises:
            EngineError: names the bucket if one does not arrive.
        """
        link = self._links.get(engine.name)
        if link is None:
            link = self._links[engine.name] = await self._join(engine)
        arguments = (manifest.path, self._config.bucket_bytes)
        link.buckets = await link.sender.call("open", *arguments, result=list[Bucket], deadline_s=self._load_s)
        await link.sender.call("gather", 0, result=type(None), deadline_s=self._load_s)
        if await self._ahead.includes(engine):
            await self._send_ahead(engine, link, str(manifest.version))

    async def send(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Let the engine serve what it has taken, or broadcast bucket after bucket; the last names the version.

        Raises:
            EngineError: names the bucket if one does not arrive.
        """
        if await self._ahead.includes(engine):
            await self._ahead.swap(engine, manifest.version)
            return
        link = self._links[engine.name]
        whole = {"weight_version": str(manifest.version), "flush_cache": not self._in_place}
        async with weight_update(engine):
            for index in range(len(link.buckets)):
                is_last = index == len(link.buckets) - 1
                more = whole if is_last else {"flush_cache": False}
                await self._send_bucket(engine, link, index, more)

    async def forget(self, engine: str) -> None:
        """Kill the engine's sender: what waits for it in the collective is freed."""
        self._ahead.forget(engine)
        link = self._links.pop(engine, None)
        if link is not None:
            link.sender.kill()

    async def close(self) -> None:
        """End all senders; safe to call twice."""
        for name in list(self._links):
            await self.forget(name)

    async def _send_ahead(self, engine: Engine, link: _Link, version: str) -> None:
        """Announce all buckets at once, so that the engine waits for none of them between two of its steps.

        Waits for: both ends of the collective. Unblocked by: their ends, or the first failure of either.
        """
        body = {"weight_version": version, "group_name": link.group, "buckets": [_announce(b) for b in link.buckets]}
        index = 0

        async def send_all() -> None:
            nonlocal index
            for index in range(len(link.buckets)):
                await self._broadcast(link, index)

        try:
            await _both(engine.update("/stage_weights", body), send_all())
        except EngineError as error:
            raise EngineError(f"{_describe(link, index)}: {error}") from error

    async def _send_bucket(self, engine: Engine, link: _Link, index: int, more: Mapping[str, Any]) -> None:
        """Waits for: both ends of the collective. Unblocked by: their ends, or the first failure of either."""
        body = {**_announce(link.buckets[index]), "group_name": link.group, "load_format": _LAYOUT, **more}
        receiving = engine.update("/update_weights_from_distributed", body)
        try:
            await _both(receiving, self._broadcast(link, index))
        except EngineError as error:
            raise EngineError(f"{_describe(link, index)}: {error}") from error

    async def _broadcast(self, link: _Link, index: int) -> None:
        await link.sender.call("broadcast", index, result=type(None), deadline_s=self._load_s)
        self.sent_bytes += link.buckets[index].num_bytes

    async def _join(self, engine: Engine) -> _Link:
        config = self._config
        name = f"agentrl-{os.getpid()}-{next(_numbers)}"
        log = self._logs / f"sender-{engine.name}.log"
        sender = await SenderProcess.start(f"sender-{engine.name}", log)
        port, world_size = free_port(""), 1 + config.ranks_per_engine
        body = {
            "master_address": config.master_address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": name,
            "backend": config.backend,
        }
        arguments = (0, config.master_address, port, world_size, name, config.backend, config.join_s, config.sender_gpu)
        joining = sender.call("join", *arguments, result=type(None), deadline_s=config.join_s)
        try:
            await _both(engine.update("/init_weights_update_group", body), joining)
        except BaseException:
            sender.kill()
            with contextlib.suppress(EngineError):
                await engine.control("/destroy_weights_update_group", {"group_name": name})
            raise
        return _Link(sender, name)


def _announce(bucket: Bucket) -> dict[str, Any]:
    shapes = [list(shape) for shape in bucket.shapes]
    return {"names": list(bucket.names), "dtypes": list(bucket.dtypes), "shapes": shapes}


def _describe(link: _Link, index: int) -> str:
    return f"bucket {index + 1} of {len(link.buckets)} ({link.buckets[index].names[0]} ...)"


async def _both(first: Any, second: Any) -> None:
    """Run two coroutines at once; the first failure cancels the other and is raised."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
