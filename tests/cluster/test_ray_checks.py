from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
import ray

from agentrl.cluster.checks import check_nodes, check_resources, complaints, wait_for_resources
from agentrl.cluster.config import MemberResources, RayRuntimeConfig
from agentrl.cluster.places import RayPlaces
from agentrl.cluster.probe import probe
from agentrl.process.place import ProcessLaunch, Role
from agentrl.process.ports import free_port
from agentrl.testing.processes import is_running
from agentrl.testing.virtual_cluster import NodeShape
from agentrl.testing.virtual_machines import VirtualMachine
from agentrl.types.errors import ConfigError


async def test_an_address_without_a_cluster_is_refused_with_the_command_that_starts_one(cluster):
    address = f"{cluster.host}:{free_port(cluster.host)}"
    with pytest.raises(ConfigError, match=rf"no Ray cluster .*'{address}'.*refused.*ray start --head"):
        RayPlaces.open(RayRuntimeConfig(kind="ray", address=address))


async def test_joining_leaves_signals_to_the_run(places):
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_fewer_gpus_than_asked_for_are_told_with_what_is_there(places, config, cluster):
    asking = config.model_copy(update={"trainer": MemberResources(cpus=2, gpus=1)})
    with pytest.raises(ConfigError, match=rf"'trainer' asks for, 2 CPU, 1 GPU\. There is .*{cluster.nodes[0].host}: 4"):
        check_resources(asking, {Role.TRAINER: 2, Role.ENGINE: 1})


async def test_more_members_than_there_is_room_for_are_refused(places, config):
    members = {Role.TRAINER: 2, Role.ENGINE: 40, Role.WORKER: 40}
    with pytest.raises(ConfigError, match=r"2 x trainer of 1 CPU, 40 x engine.* 82 CPU in all.*runtime.elastic"):
        check_resources(config, members)
    elastic = config.model_copy(update={"elastic": True})
    with pytest.raises(ConfigError, match=r"40 x engine.*Add nodes, or ask for less in \[runtime\]$"):
        check_resources(elastic, members)
    check_resources(elastic, {Role.TRAINER: 2, Role.ENGINE: 1, Role.WORKER: 1})


async def test_a_run_that_goes_on_waits_for_a_node_in_place_of_the_one_that_it_lost(places, config, cluster, shared):
    """Two nodes of four CPUs have no room for nine members; a third one joins once the run has said so."""
    await check_nodes(shared)  # as a run does first: Ray counts a node that an earlier test has killed for a while
    members, said = {Role.WORKER: 9}, []
    waiting = asyncio.create_task(wait_for_resources(config, members, said.append))
    async with asyncio.timeout(60):
        while not said:
            assert not waiting.done(), "the cluster had room at once"
            await asyncio.sleep(0.05)
    assert said[0].startswith("waiting up to 120 s for nodes: the recipe asks for more than the cluster has: 9 x")
    assert not waiting.done()
    node = cluster.add_node()
    try:
        async with asyncio.timeout(60):
            assert await waiting
        assert not await wait_for_resources(config, members, said.append)
        assert len(said) == 1
    finally:
        cluster.kill_node(node)


async def test_a_run_that_goes_on_fails_once_nodes_have_been_missing_for_long(places, config):
    brief = config.model_copy(update={"wait_s": 0.1})
    with pytest.raises(ConfigError, match=r"90 x worker of 1 CPU.*Add nodes"):
        await wait_for_resources(brief, {Role.WORKER: 90}, lambda said: None)


async def test_nodes_of_this_program_that_see_the_folder_pass_and_keep_no_token(places, shared: Path):
    await check_nodes(shared)
    assert list(shared.glob(".seen*")) == []


async def test_a_folder_that_nodes_do_not_see_is_told_with_its_remedy(places, cluster, tmp_path: Path):
    with pytest.raises(ConfigError, match=rf"node {cluster.host[:-1]}\d+ does not see the run folder {tmp_path}: set"):
        await check_nodes(tmp_path)


@pytest.fixture
def elsewhere(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a working copy of agentrl: where a driver is, Ray's workers look for modules first."""
    monkeypatch.chdir(shared)


async def test_a_node_with_another_program_or_a_full_disk_is_named(elsewhere, places, cluster, shared: Path):
    """One test, since each node takes seconds."""
    other = shared / "other"
    (other / "agentrl").mkdir(parents=True)
    (other / "agentrl" / "__init__.py").touch()
    (other / "agentrl-9.9.dist-info").mkdir()
    (other / "agentrl-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: agentrl\nVersion: 9.9\n")
    node = cluster.add_node(NodeShape(environment={"PYTHONPATH": str(other)}))
    try:
        with pytest.raises(ConfigError, match=rf"node {node.host} has agentrl 9.9 \(source .*\), and this machine 0"):
            await check_nodes(shared)
    finally:
        cluster.kill_node(node)
    node = cluster.nodes[0]
    resize(node, "64m")
    try:
        with pytest.raises(ConfigError, match=rf"node {node.host} has \d+ MB left for its temporary files.*free space"):
            await check_nodes(shared)
    finally:
        resize(node, "1g")
    await check_nodes(shared)


def resize(node: VirtualMachine, size: str) -> None:
    subprocess.run(node.command(["mount", "-o", f"remount,size={size}", "/tmp"]), check=True)


@pytest.mark.parametrize("name", ["Python", "Ray", "agentrl"])
def test_another_version_is_a_complaint_and_so_is_none(name, tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("word")
    here = probe(str(token), str(tmp_path))
    assert list(complaints(here, here, "word", tmp_path)) == []
    assert next(complaints({**here, name: "1.2.3"}, here, "word", tmp_path)).startswith(f"has {name} 1.2.3, and this")
    assert next(complaints({**here, name: ""}, here, "word", tmp_path)).startswith(f"has no {name}: install {name} ")


def test_the_probe_finds_the_versions_that_python_itself_tells(tmp_path: Path):
    facts = probe(str(tmp_path / "none"), str(tmp_path))
    assert facts["Ray"] == ray.__version__
    assert facts["token"] == ""


async def test_auto_joins_the_cluster_that_the_environment_names_as_for_a_job(cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    places = RayPlaces.open(RayRuntimeConfig(kind="ray"))
    assert places.host == cluster.host
    place = await places.take(Role.WORKER, "worker-0")
    assert place.host in {node.host for node in cluster.nodes}
    await places.close()


async def test_local_starts_a_cluster_that_ends_with_the_run(cluster, monkeypatch):
    """Beside the other cluster, whose switch for tokens holds for it, too: else Ray would write one into our home."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a path of pytest's is too long for sockets
    monkeypatch.setenv("RAY_TMPDIR", folder)
    places = RayPlaces.open(RayRuntimeConfig(kind="ray", address="local", wait_s=120))
    place = await places.take(Role.WORKER, "worker-0")
    child = await place.start(ProcessLaunch("child", ("-c", "import time; time.sleep(1000)"), has_socket=False))
    assert is_running(child.pid)
    await places.close()
    async with asyncio.timeout(120):
        while is_running(child.pid):
            await asyncio.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)
