"""Transport by collective broadcast: buckets of staged weights go to an engine's ranks by gloo or NCCL.

Every engine has a group of its own with a sender process of its own. A sick engine therefore holds no
healthy one, no two engines share a pause, and a broadcast that hangs is abandoned by killing its sender.
The price is one copy on the wire for each engine, where one group of all would send a tree.

The trainer's ranks gather the weights parameter by parameter, once for all engines, and rank 0 writes one to a file
while the next is gathered; the sender maps the file, and flattens the next bucket while one is sent. So no rank waits
for a broadcast, and none holds more than a few parameters.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.inference.weights import both
from agentrl.process.ports import LOOPBACK, free_port
from agentrl.protocols import Engine
from agentrl.types.batch import WeightsManifest
from agentrl.types.errors import EngineError
from agentrl.types.weights import BroadcastWeights, Bucket, WeightGroup
from agentrl.weights.config import BroadcastTransportConfig
from agentrl.weights.sender import SenderProcess

_AUTO = "auto"
_numbers = itertools.count()


@dataclass(slots=True)
class _Link:
    """A sender and the group that it forms with one engine."""

    sender: SenderProcess
    group: str
    buckets: list[Bucket] = field(default_factory=list)


class BroadcastTransport:
    """Sends buckets while the engine generates, if it can take them so, else in its pause; groups stay.

    `host` is the address by which engines reach this machine, where the senders run, unless the configuration names
    another.
    """

    def __init__(self, config: BroadcastTransportConfig, load_s: float, logs: Path, host: str = LOOPBACK) -> None:
        self._config, self._load_s, self._logs = config, load_s, logs
        self._host = host if config.master_address == _AUTO else config.master_address
        self._links: dict[str, _Link] = {}
        self.sent_bytes = 0

    async def needs_pause(self, engine: Engine) -> bool:
        """As the engine says."""
        return await engine.needs_pause()

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
        await engine.stage(self._source(link), manifest.version)

    async def send(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Let the engine serve what it has taken, or broadcast bucket after bucket.

        Raises:
            EngineError: names the bucket if one does not arrive.
        """
        await engine.swap(self._source(self._links[engine.name]), manifest.version)

    async def forget(self, engine: str) -> None:
        """Kill the engine's sender: what waits for it in the collective is freed."""
        link = self._links.pop(engine, None)
        if link is not None:
            link.sender.kill()

    async def close(self) -> None:
        """End all senders; safe to call twice."""
        for name in list(self._links):
            await self.forget(name)

    def _source(self, link: _Link) -> BroadcastWeights:
        return BroadcastWeights(link.group, tuple(link.buckets), lambda index: self._broadcast(link, index))

    async def _broadcast(self, link: _Link, index: int) -> None:
        await link.sender.call("broadcast", index, result=type(None), deadline_s=self._load_s)
        self.sent_bytes += link.buckets[index].num_bytes

    async def _join(self, engine: Engine) -> _Link:
        config = self._config
        name = f"agentrl-{os.getpid()}-{next(_numbers)}"
        log = self._logs / f"sender-{engine.name}.log"
        sender = await SenderProcess.start(f"sender-{engine.name}", log)
        group = WeightGroup(name, config.backend, self._host, free_port(""), 1 + config.ranks_per_engine)
        arguments = (0, group.address, group.port, group.world_size, name, group.backend, config.join_s)
        joining = sender.call("join", *arguments, config.sender_gpu, result=type(None), deadline_s=config.join_s)
        try:
            await both(engine.join_group(group), joining)
        except BaseException:
            sender.kill()
            with contextlib.suppress(EngineError):
                await engine.leave_group(name)
            raise
        return _Link(sender, name)
