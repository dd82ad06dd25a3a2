"""Sandboxes of episodes that workers on several nodes play."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentrl.cluster.nodes import live_nodes
from agentrl.cluster.places import RayPlaces
from agentrl.orchestration.worker_handle import WorkerProcess
from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.keepers import SandboxKeepers
from agentrl.sandbox.starting import SandboxKeeper
from agentrl.testing.tiny import make_tiny_model
from agentrl.testing.virtual_cluster import VirtualCluster
from agentrl.testing.virtual_machines import VirtualMachine
from agentrl.types.environment import EnvironmentDescription, Recovery
from agentrl.types.errors import Boundary
from tests.cluster.test_ray_places import is_on, processes_on, run_on, until
from tests.integration import runs
from tests.storms.worker_pools import DIALOGUE, PlayedPool, make_run, playing

pytestmark = pytest.mark.timeout(600)
NUM_EPISODES, NUM_CALLS = 8, sum(len(message.tool_calls) for message in DIALOGUE)
LINGER_S = 1.7531
NEEDS_SANDBOX = EnvironmentDescription("counting_sandbox", Recovery(), needs_sandbox=True)


@pytest.fixture(scope="session")
def model(shared: Path) -> Path:
    return make_tiny_model(shared / "sandbox-model")


@asynccontextmanager
async def played(
    places: RayPlaces, model: Path, folder: Path, linger_s: float = 0.0
) -> AsyncIterator[tuple[PlayedPool, SandboxKeepers]]:
    """A pool of two workers whose tool calls each run a command in a sandbox that counts it."""
    folder.mkdir()
    options = {"count_file": str(folder / "count.txt"), "linger_s": linger_s}
    environment = {"name": "tests.storms.sandbox_plugins:counting", "placement": "process", "options": options}
    run = make_run(model, folder, environment=environment, rollout={"workers": 2, "limits": {"tool_s": 60.0}})
    config = SandboxConfig()
    own = SandboxKeeper(config, "test", folder / "no-socket", None)
    keepers = SandboxKeepers(own, config, "test", folder, places, [NEEDS_SANDBOX])
    try:
        async with playing(run, places=keepers) as pool:
            yield pool, keepers
    finally:
        await keepers.close()


def worker(pool: PlayedPool, name: str) -> WorkerProcess:
    return next(worker for worker in pool.pool._workers.values() if worker.name == name)


def machine(cluster: VirtualCluster, worker: WorkerProcess) -> VirtualMachine:
    host = next(node.host for node in live_nodes() if node.node_id == worker.node)
    return next(node for node in cluster.nodes if node.host == host)


def counted(folder: Path) -> dict[str, list[str]]:
    """Hosts of the sandboxes in which each call was carried out."""
    hosts: dict[str, list[str]] = {}
    for line in (folder / "count.txt").read_text().splitlines():
        effect, handle, _ = line.split()
        hosts.setdefault(effect, []).append(handle.partition("/")[0])
    return hosts


def sessions_at(pool: PlayedPool, turn: int) -> set[str]:
    """Episodes whose turn of that number was asked for: what came before is on record."""
    return {session for session, asked in pool.engine.requests if asked == turn}


def left_on(node: VirtualMachine) -> list[str]:
    """What sandboxes and keepers have left: files, and processes."""
    files = [name for name in run_on(node, "ls", "/tmp").split() if name.startswith("agentrl-")]
    return files + [words for words in processes_on(node).values() if "bwrap" in words or "agentrl.sandbox" in words]


async def test_the_successor_of_a_worker_goes_on_in_the_sandboxes_of_its_node(cluster, places, shared, model):
    folder = shared / "sandboxes-worker"
    async with played(places, model, folder, LINGER_S) as (pool, keepers):
        lost = worker(pool, "worker-1")
        node = machine(cluster, lost)
        assert node is not machine(cluster, worker(pool, "worker-2"))
        playing_all = asyncio.create_task(pool.play(range(NUM_EPISODES)))
        await until(lambda: len(sessions_at(pool, 0)) == NUM_EPISODES)
        await until(lambda: is_on(node, f"sleep\x00{LINGER_S}"))
        assert left_on(node)
        run_on(node, "kill", "-9", str(lost.pid))
        episodes = await playing_all
        metrics = pool.pool.metrics()
        successor = worker(pool, "worker-1")
        await until(lambda: keepers.metrics()["sandbox/commands_total"] == NUM_EPISODES * NUM_CALLS)
        counts = keepers.metrics()
    assert [(episode.failure, len(episode.turns)) for episode in episodes] == [(None, len(DIALOGUE))] * NUM_EPISODES
    assert (metrics["workers/restarts_total"], metrics["workers/handed_over_total"]) == (1, NUM_EPISODES / 2)
    assert successor.node == lost.node
    assert successor.pid != lost.pid
    hosts = counted(folder)
    assert len(hosts) == NUM_EPISODES * NUM_CALLS
    assert all(len(found) == 1 for found in hosts.values()), "a call was carried out twice"
    assert {host for [host] in hosts.values()} == {node.host for node in cluster.nodes}
    assert counts["sandbox/opened_total"] == NUM_EPISODES
    assert counts["sandbox/attached_total"] == NUM_EPISODES / 2
    for node in cluster.nodes:
        assert left_on(node) == []


async def test_with_its_node_an_episodes_sandbox_is_lost_and_the_reason_is_on_record(cluster, places, shared, model):
    folder = shared / "sandboxes-node"
    async with played(places, model, folder) as (pool, _):
        lost = worker(pool, "worker-1")
        node = machine(cluster, lost)
        pool.engine.held_turn = 1
        playing_all = asyncio.create_task(pool.play(range(NUM_EPISODES)))
        await until(lambda: len(sessions_at(pool, 1)) == NUM_EPISODES)
        cluster.kill_node(node)
        await until(lambda: pool.pool.metrics()["workers/handed_over_total"] == NUM_EPISODES / 2)
        pool.engine.released.set()
        episodes = await playing_all
    cluster.add_node()
    failed = [episode for episode in episodes if episode.failure is not None]
    assert len(failed) == NUM_EPISODES / 2
    for episode in failed:
        assert (episode.failure.boundary, episode.failure.kind) == (Boundary.ENVIRONMENT, "lost")
        assert f"sandbox {node.host}/" in episode.failure.message
    hosts = counted(folder)
    assert len(hosts) == NUM_EPISODES / 2 * NUM_CALLS
    assert all(len(found) == 1 for found in hosts.values()), "a call was carried out twice"
    assert node.host not in {host for [host] in hosts.values()}
    for other in cluster.nodes:
        assert left_on(other) == []


def test_an_evaluation_has_its_sandboxes_on_the_node_of_its_worker(cluster: VirtualCluster, shared: Path, model: Path):
    folder = shared / "sandboxes-evaluation"
    folder.mkdir()
    overrides = (
        *(
            "environment.name=terminal",
            "environment.placement=process",
            "rollout.workers=1",
            "rollout.limits.tool_s=60",
        ),
        *("runtime.kind=ray", f"runtime.address={cluster.address}", "policies.main.engine.kind=embedded"),
    )
    _, *arguments = runs.train_arguments(folder, model, *overrides)
    result = runs.agentrl("eval", *arguments, "--tasks", "4")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "failed" not in result.stdout
    assert [*(folder / "runs").iterdir()] == []
    for node in cluster.nodes:
        assert left_on(node) == []


DRIVER = """
import asyncio, sys
from pathlib import Path
from tests.cluster.test_ray_sandboxes import *
from agentrl.cluster.config import RayRuntimeConfig
from agentrl.process.place import Role

async def main():
    places = RayPlaces.open(RayRuntimeConfig(kind="ray", address=sys.argv[1]))
    own = SandboxKeeper(SandboxConfig(), "test", Path(sys.argv[2]) / "no-socket", None)
    keepers = SandboxKeepers(own, SandboxConfig(), "test", Path(sys.argv[2]), places, [NEEDS_SANDBOX])
    place = await places.take(Role.WORKER, "worker")
    await keepers.variables_at(place)
    print(place.host, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_a_run_that_is_killed_leaves_no_sandbox_on_any_node(cluster: VirtualCluster, shared: Path):
    folder = shared / "sandboxes-killed"
    folder.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, cluster.address, str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        host = driver.stdout.readline().strip()
        node = next(node for node in cluster.nodes if node.host == host)
        assert left_on(node)
    finally:
        driver.kill()
        driver.communicate()
    asyncio.run(until(lambda: left_on(node) == []))
