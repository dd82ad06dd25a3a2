"""The keepers of a run: this machine's own, and one on each other machine where its episodes are played.

A keeper is at a place of its own, so that it outlives the workers of its machine, and ends with the run, or with the
machine. One that ends by itself is replaced: what was in its sandboxes is lost, and new ones are to be had.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.process.place import Place, PlacedProcess, PlaceLostError, Places, ProcessLaunch, Role
from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.starting import KeeperEndedError, SandboxKeeper
from agentrl.sandbox.wire import SOCKET_VARIABLE
from agentrl.types.environment import EnvironmentDescription
from agentrl.types.errors import AgentRLError, ConfigError

_log = logging.getLogger(__name__)


class SandboxKeepers:
    """The keepers of a run, each started once something is to be played on its machine that needs sandboxes.

    They hand out a run's `places` as places from whose processes the machine's keeper is found.
    `own` is this machine's, which somebody else starts and ends. The others write to files beside `logs`.
    """

    def __init__(
        self,
        own: SandboxKeeper,
        config: SandboxConfig,
        label: str,
        logs: Path,
        places: Places,
        environments: Iterable[EnvironmentDescription],
    ) -> None:
        self._own, self._config, self._label, self._logs, self._places = own, config, label, logs, places
        self._is_needed = any(environment.needs_sandbox for environment in environments)
        self._sockets: dict[str, Path] = {own.place.node: own.socket}
        self._keepers: dict[str, SandboxKeeper] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._starting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._counts: dict[str, float] = {}
        self._num_replaced = 0

    @property
    def host(self) -> str:
        """As that of the places."""
        return self._places.host

    @property
    def is_elastic(self) -> bool:
        """As that of the places."""
        return self._places.is_elastic

    async def take(self, role: Role, name: str, team: str = "") -> Place:
        """A place for what plays. Raises PlaceLostError."""
        return _PlaceWithKeeper(await self._places.take(role, name, team), self)

    async def gang(self, role: Role, names: Sequence[str]) -> list[Place]:
        """The same for several. Raises PlaceLostError."""
        return [_PlaceWithKeeper(place, self) for place in await self._places.gang(role, names)]

    async def beside(self, place: Place, name: str) -> Place:
        """The same on the machine of another one. Raises PlaceLostError."""
        return _PlaceWithKeeper(await self._places.beside(place, name), self)

    async def watch(self) -> None:
        """Waits for: the loss of the places. Raises PlacesLostError."""
        await self._places.watch()

    async def variables_at(self, place: Place) -> dict[str, str]:
        """What the environment of a process has at a place by which it finds its machine's keeper.

        Waits for: the keeper, if it is not up. Unblocked by: it, or its deadlines.

        Raises:
            ConfigError: there can be no such sandboxes there.
            PlaceLostError: the machine is gone.
        """
        if not self._is_needed:
            return {}
        async with self._starting[place.node]:
            if place.node != self._own.place.node and place.node not in self._keepers:
                keeper = await self._start(place)
                watch = asyncio.create_task(self._watch(keeper), name=f"watch-sandboxes-{place.host}")
                self._watches.add(watch)
                watch.add_done_callback(self._watches.discard)
            return {SOCKET_VARIABLE: str(self._sockets[place.node])}

    def metrics(self) -> dict[str, float]:
        """What all of them have counted, those included that have ended."""
        counted = [self._own.metrics(), self._counts, *(keeper.metrics() for keeper in self._keepers.values())]
        total = _sum(counted)
        return {**total, "sandbox/keepers_replaced_total": float(self._num_replaced)} if total else {}

    async def close(self) -> None:
        """End those that are not this machine's, with all their sandboxes; safe to call twice."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await asyncio.gather(*(self._end(keeper) for keeper in self._keepers.values()))
        self._keepers.clear()

    async def _start(self, beside: Place) -> SandboxKeeper:
        """Raises ConfigError or PlaceLostError."""
        place = await self._places.beside(beside, f"sandboxes-{beside.host}")
        # By the same path as the keeper before it, so that workers that go on find this one.
        socket = self._sockets.setdefault(place.node, Path(f"/tmp/agentrl-keeper-{secrets.token_hex(8)}/socket"))
        keeper = SandboxKeeper(self._config, self._label, socket, self._logs / f"sandboxes-{place.host}.log", place)
        try:
            await keeper.start()
        except BaseException as error:
            await self._end(keeper)
            if isinstance(error, KeeperEndedError | OSError):
                raise PlaceLostError(f"node {place.host}: {error}") from error
            if isinstance(error, ConfigError):
                raise ConfigError(f"node {place.host}: {error}") from error
            raise
        self._keepers[place.node] = keeper
        return keeper

    async def _watch(self, keeper: SandboxKeeper) -> None:
        """Waits for: the end of a keeper, to replace it. Unblocked by: one that does not start, `close`."""
        while True:
            how, place = await keeper.ended(), keeper.place
            _log.warning("the keeper of sandboxes on %s ended (%s), and its sandboxes are lost", place.host, how)
            async with self._starting[place.node]:
                self._counts = _sum([self._counts, self._keepers.pop(place.node).metrics()])
                await self._end(keeper)
                try:
                    keeper = await self._start(place)
                except AgentRLError as error:
                    _log.warning("no other keeper of sandboxes starts on %s: %s", place.host, error)
                    return
                self._num_replaced += 1

    async def _end(self, keeper: SandboxKeeper) -> None:
        await keeper.close()
        await keeper.place.close()


@dataclass(frozen=True, slots=True)
class _PlaceWithKeeper:
    """A place, and those who start its machine's keeper before anything else is started there."""

    place: Place
    keepers: SandboxKeepers

    @property
    def host(self) -> str:
        return self.place.host

    @property
    def node(self) -> str:
        return self.place.node

    async def start(self, launch: ProcessLaunch) -> PlacedProcess:
        """Raises ConfigError as well, if there can be no sandboxes there."""
        variables = await self.keepers.variables_at(self.place)
        return await self.place.start(replace(launch, environment={**launch.environment, **variables}))

    async def free_port(self) -> int:
        return await self.place.free_port()

    async def close(self) -> None:
        await self.place.close()


def _sum(counted: Iterable[dict[str, float]]) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for counts in counted:
        for name, number in counts.items():
            total[name] += number
    return dict(total)
