"""The keepers of a run on several machines; the machines are places of this one under other names."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentrl.process.local_place import LocalPlaces
from agentrl.process.place import Place, PlaceLostError, ProcessLaunch, Role
from agentrl.sandbox.client import KeeperHost
from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.keepers import SandboxKeepers
from agentrl.sandbox.starting import SandboxKeeper
from agentrl.sandbox.wire import SOCKET_VARIABLE
from agentrl.testing.pumped_place import PumpedPlace, PumpedPlaces, PumpedProcess
from agentrl.types.environment import EnvironmentDescription
from agentrl.types.errors import ConfigError, EpisodeError
from agentrl.types.sandbox import SandboxSpec

DEADLINE_S = 120.0
SPEC = SandboxSpec(needs=frozenset())
NEEDS_SANDBOX = EnvironmentDescription("shell", needs_sandbox=True)
LAUNCH = ProcessLaunch("worker", ("-c", "import time; time.sleep(1000)"), has_socket=False)


class FarPlace(PumpedPlace):
    """A place of a machine with an address of its own."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self._host = host
        self.started: list[tuple[ProcessLaunch, PumpedProcess]] = []

    @property
    def host(self) -> str:
        return self._host

    @property
    def node(self) -> str:
        return f"node of {self._host}"

    async def start(self, launch: ProcessLaunch) -> PumpedProcess:
        process = await super().start(launch)
        self.started.append((launch, process))
        return process


class FarPlaces(PumpedPlaces):
    """Workers are on a machine of their own, unless they are said to be on one that is there."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[FarPlace] = []

    async def take(self, role: Role, name: str, team: str = "") -> FarPlace:
        return self._add(name)

    async def gang(self, role: Role, names: Sequence[str]) -> list[Place]:
        return [self._add(name) for name in names]

    async def beside(self, place: Place, name: str) -> FarPlace:
        return self._add(place.host)

    async def close(self) -> None:
        for place in self.all:
            await place.close()

    def keepers(self) -> list[PumpedProcess]:
        return [process for place in self.all for launch, process in place.started if launch.name == "sandboxes"]

    def _add(self, host: str) -> FarPlace:
        self.all.append(FarPlace(host))
        return self.all[-1]


@asynccontextmanager
async def keepers(
    folder: Path,
    places: PumpedPlaces | LocalPlaces,
    kind: str = "local",
    described: EnvironmentDescription = NEEDS_SANDBOX,
) -> AsyncIterator[SandboxKeepers]:
    config = SandboxConfig(kind=kind)
    own = SandboxKeeper(config, "test", folder / "own", None)
    made = SandboxKeepers(own, config, "test", folder, places, [described])
    try:
        yield made
    finally:
        await made.close()
        await places.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.05)


async def host_at(keepers: SandboxKeepers, name: str) -> KeeperHost:
    """The sandboxes that a worker on a machine finds."""
    place = await keepers.take(Role.WORKER, name)
    return KeeperHost(Path((await keepers.variables_at(place))[SOCKET_VARIABLE]))


async def test_workers_of_a_machine_share_its_keeper_and_find_it_by_their_environment(tmp_path: Path) -> None:
    places = FarPlaces()
    async with keepers(tmp_path, places) as kept:
        taken = [await kept.take(Role.WORKER, host) for host in ("10.0.0.1", "10.0.0.1", "10.0.0.2")]
        await asyncio.gather(*(place.start(LAUNCH) for place in taken))
        launches = [launch for place in places.all for launch, _ in place.started]
        found = [launch.environment[SOCKET_VARIABLE] for launch in launches if launch.name == "worker"]
        assert [launch.name for launch in launches].count("sandboxes") == 2
        assert found[0] == found[1] != found[2]
        assert all(Path(path).is_socket() for path in found)
    assert not any(Path(path).parent.exists() for path in found)
    assert all(process.returncode is not None for process in places.keepers())


async def test_a_sandbox_is_not_found_on_another_machine_which_is_said_at_once(tmp_path: Path) -> None:
    async with keepers(tmp_path, FarPlaces()) as kept:
        here, there = await host_at(kept, "10.0.0.1"), await host_at(kept, "10.0.0.2")
        sandbox = await here.open(SPEC)
        handle = await sandbox.keep()
        with pytest.raises(EpisodeError, match=r"sandbox 10\.0\.0\.1/\w+ is not on 10\.0\.0\.2") as caught:
            await there.attach(handle, 1)
        assert caught.value.failure.kind == "lost"
        await (await here.attach(handle, 1)).close()


async def test_a_keeper_that_ends_is_replaced_where_workers_look_for_it_and_its_counts_stay(tmp_path: Path) -> None:
    places = FarPlaces()
    async with keepers(tmp_path, places) as kept:
        host, other = await host_at(kept, "10.0.0.1"), await host_at(kept, "10.0.0.2")
        sandbox = await host.open(SPEC)
        handle = await sandbox.keep()
        await other.open(SPEC)
        await until(lambda: kept.metrics()["sandbox/opened_total"] == 2)
        os.killpg(places.keepers()[0].pid, signal.SIGKILL)
        await until(lambda: kept.metrics()["sandbox/keepers_replaced_total"] == 1)
        with pytest.raises(EpisodeError, match="no sandbox"):
            await host.attach(handle, 1)
        await host.open(SPEC)
        await until(lambda: kept.metrics()["sandbox/opened_total"] == 3)


async def test_what_keeps_a_machine_from_having_sandboxes_is_said_with_its_name(tmp_path: Path) -> None:
    async with keepers(tmp_path, FarPlaces(), kind="nowhere") as kept:
        place = await kept.take(Role.WORKER, "10.0.0.1")
        with pytest.raises(ConfigError, match=r"^node 10\.0\.0\.1: .*nowhere"):
            await place.start(LAUNCH)


async def test_a_machine_that_is_gone_while_its_keeper_starts_is_a_place_that_is_lost(tmp_path: Path) -> None:
    places = FarPlaces()
    async with keepers(tmp_path, places) as kept:
        place = await kept.take(Role.WORKER, "10.0.0.1")
        starting = asyncio.create_task(place.start(LAUNCH))
        await until(lambda: len(places.keepers()) == 1)
        places.all[-1].lose()
        with pytest.raises(PlaceLostError, match=r"10\.0\.0\.1"):
            await starting


@pytest.mark.parametrize("needs_sandbox", [True, False])
async def test_on_this_machine_and_without_need_no_further_keeper_is_started(
    tmp_path: Path, needs_sandbox: bool
) -> None:
    described = EnvironmentDescription("shell", needs_sandbox=needs_sandbox)
    async with keepers(tmp_path, LocalPlaces() if needs_sandbox else FarPlaces(), described=described) as kept:
        place = await kept.take(Role.WORKER, "worker-1")
        found = await kept.variables_at(place)
        assert found == ({SOCKET_VARIABLE: str(tmp_path / "own")} if needs_sandbox else {})
        assert not [*tmp_path.glob("sandboxes*.log")]
        assert kept.metrics() == {}
