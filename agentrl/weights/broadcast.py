"""Transport by collective broadcast: buckets of staged weights go to an engine's ranks by gloo or NCCL.

Every engine has a group of its own with a sender process of its own. A sick engine therefore holds no
healthy one, no two engines share a pause, and a broadcast that hangs is abandoned by killing its sender.
The price is one copy on the wire for each engine, where one group of all would send a tree.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.protocols import Engine
from agentrl.types.batch import WeightsManifest
from agentrl.types.errors import EngineError
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
    """Sends buckets while the engine is paused; groups stay between publications."""

    pauses = True

    def __init__(self, config: BroadcastTransportConfig, load_s: float, flushes: bool, logs: Path) -> None:
        self._config, self._load_s, self._flushes, self._logs = config, load_s, flushes, logs
        self._links: dict[str, _Link] = {}

    async def prepare(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Form the group if there is none, and map the staged weights. Raises EngineError."""
        link = self._links.get(engine.name)
        if link is None:
            link = self._links[engine.name] = await self._join(engine)
        arguments = (manifest.path, self._config.bucket_bytes)
        link.buckets = await link.sender.call("open", *arguments, result=list[Bucket], deadline_s=self._load_s)

    async def send(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Broadcast bucket after bucket; the last names the version. Raises EngineError naming the bucket."""
        link = self._links[engine.name]
        async with weight_update(engine):
            for index, bucket in enumerate(link.buckets):
                is_last = index == len(link.buckets) - 1
                body: dict[str, Any] = {
                    "names": list(bucket.names),
                    "dtypes": list(bucket.dtypes),
                    "shapes": [list(shape) for shape in bucket.shapes],
                    "group_name": link.group,
                    "load_format": _LAYOUT,
                    "flush_cache": is_last and self._flushes,
                }
                if is_last:
                    body["weight_version"] = str(manifest.version)
                what = f"bucket {index + 1} of {len(link.buckets)} ({bucket.names[0]} ...)"
                await self._send_bucket(engine, link, index, body, what)

    async def forget(self, engine: str) -> None:
        """Kill the engine's sender: what waits for it in the collective is freed."""
        link = self._links.pop(engine, None)
        if link is not None:
            link.sender.kill()

    async def close(self) -> None:
        """End all senders; safe to call twice."""
        for name in list(self._links):
            await self.forget(name)

    async def _send_bucket(self, engine: Engine, link: _Link, index: int, body: dict[str, Any], what: str) -> None:
        """Waits for: both ends of the collective. Unblocked by: their ends, or the first failure of either."""
        sending = link.sender.call("broadcast", index, result=type(None), deadline_s=self._load_s)
        try:
            await _both(engine.update("/update_weights_from_distributed", body), sending)
        except EngineError as error:
            raise EngineError(f"{what}: {error}") from error

    async def _join(self, engine: Engine) -> _Link:
        config = self._config
        name = f"agentrl-{os.getpid()}-{next(_numbers)}"
        log = self._logs / f"sender-{engine.name}.log"
        sender = await SenderProcess.start(f"sender-{engine.name}", log)
        port, world_size = _free_port(), 1 + config.ranks_per_engine
        body = {
            "master_address": config.master_address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": name,
            "backend": config.backend,
        }
        arguments = (0, config.master_address, port, world_size, name, config.backend, config.join_s)
        joining = sender.call("join", *arguments, result=type(None), deadline_s=config.join_s)
        try:
            await _both(engine.update("/init_weights_update_group", body), joining)
        except BaseException:
            sender.kill()
            with contextlib.suppress(EngineError):
                await engine.control("/destroy_weights_update_group", {"group_name": name})
            raise
        return _Link(sender, name)


async def _both(first: Any, second: Any) -> None:
    """Run two coroutines at once; the first failure cancels the other and is raised."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
