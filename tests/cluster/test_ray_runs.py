"""Whole runs on the nodes of a cluster."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from agentrl.testing.tiny import make_tiny_model
from agentrl.testing.virtual_cluster import NodeShape, VirtualCluster
from agentrl.testing.virtual_machines import VirtualMachine
from tests.integration import runs
from tests.storms.in_turn import family

pytestmark = pytest.mark.timeout(600)
ENGINE, WORKER, RANK = "--weight-version", "agentrl.orchestration.worker_process", "agentrl.trainer.rank"
ACTOR = "ray::ProcessActor"
ENDLESS = runs.ENDLESS


@pytest.fixture(scope="session")
def model(shared: Path) -> Path:
    return make_tiny_model(shared / "model")


@contextmanager
def running(cluster: VirtualCluster, folder: Path, model: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """A run with two engines and two workers, which is killed if the block ends before it."""
    folder.mkdir()
    given = (
        f"runtime.address={cluster.address}",
        "policies.main.engine.kind=embedded",
        "policies.main.engine.count=2",
        "rollout.workers=2",
    )
    with (folder / "output").open("w") as output:
        process = runs.start(folder, model, "runtime.kind=ray", *given, *overrides, output=output)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def stop(process: subprocess.Popen[str], folder: Path) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == runs.STOPPED, (folder / "output").read_text()


def children_on(node: VirtualMachine, *words: str) -> list[int]:
    """Processes of a node whose command has one of these words."""
    found = []
    for pid in family(node.pid):
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text()
            found += [pid] if any(word in command for word in words) else []
    return found


def newest(run: Path) -> dict[str, float]:
    """The metrics of the last step."""
    return [row for row in runs.metrics(run) if "workers/running" in row][-1]


def test_a_run_on_two_nodes_parks_when_it_is_stopped_and_trains_what_it_plays(cluster, shared, model):
    folder = shared / "whole"
    run = folder / "runs" / "test-seed0"
    transport = "policies.main.publish.transport.kind=broadcast"
    with running(cluster, folder, model, transport, "steps=8", "checkpoint.interval_steps=1") as process:
        runs.wait_for_step(run, 2, process)
        for word in (ENGINE, WORKER):
            assert [len(children_on(node, word)) for node in cluster.nodes] == [1, 1], word
        assert sum(len(children_on(node, RANK)) for node in cluster.nodes) == 1
        stop(process, folder)
    assert runs.state(run)["status"] == "stopped"
    # Ray tells every driver of nodes that are dead, which other tests may have killed.
    told = [line for line in (folder / "output").read_text().splitlines() if "has been marked dead" not in line]
    assert not any("(raylet)" in line or "ray.io" in line for line in told)
    until = time.monotonic() + 120.0  # Ray answers that an actor is killed before it is dead
    while any(children_on(node, ENGINE, WORKER, RANK, ACTOR) for node in cluster.nodes):
        assert time.monotonic() < until, "processes of the run are left on the nodes"
        time.sleep(0.1)
    result = runs.agentrl("resume", run)
    assert result.returncode == 0, result.stdout + result.stderr
    runs.assert_whole(run)
    runs.assert_archived_as_in_ledger(run)
    runs.assert_trained(run, 8 * 8)


def test_an_elastic_run_begins_with_what_is_there_and_goes_on_with_nodes_that_join(cluster, shared, model):
    """What joined alone plays and generates behind the loss of the first node."""
    folder = shared / "elastic"
    run = folder / "runs" / "test-seed0"
    shape = NodeShape(cpus=2, resources={"seat": 2})
    seats = [f"runtime.{role}.resources={{seat = 1}}" for role in ("engines", "workers")]
    first = cluster.add_node(shape)
    with running(cluster, folder, model, "runtime.elastic=true", *seats, ENDLESS) as process:
        runs.wait_for_step(run, 1, process)
        runs.wait_until(lambda: newest(run)["workers/running"] == newest(run)["engines/healthy"] == 1, process)
        second = cluster.add_node(shape)
        runs.wait_until(lambda: newest(run)["workers/running"] == newest(run)["engines/healthy"] == 2, process)
        assert len(children_on(second, WORKER)) == len(children_on(second, ENGINE)) == 1
        cluster.kill_node(first)
        runs.wait_until(lambda: newest(run)["workers/running"] == newest(run)["engines/healthy"] == 1, process)
        runs.wait_for_step(run, int(newest(run)["step"]) + 3, process)
        stop(process, folder)
    assert runs.state(run)["status"] == "stopped"
    cluster.kill_node(second)
