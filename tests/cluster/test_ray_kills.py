"""One of each kind is killed of a run on a cluster of its own; the full storm is the benchmark `ray_kill_storm`."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model
from agentrl.testing.virtual_cluster import VirtualCluster
from tests.storms.ray_kills import NODE, NUM_NODES, RayStorm, Victim, programs_on
from tests.storms.run_account import RunAccount

pytestmark = pytest.mark.timeout(1200)
CONTEXT_TOKENS = 4096
OVERRIDES = (
    "steps=100000",
    "scaffold.name=tests.storms.kill_plugins:Scripted",
    f"rollout.limits={{max_turns = 4, max_context_tokens = {CONTEXT_TOKENS}, max_reply_tokens = 24}}",
)
# And the driver, at last.
VICTIMS = (Victim.WORKER, Victim.ENGINE_ACTOR, Victim.TRAINER, Victim.NODE)

WATCH = """
import asyncio, sys
from agentrl.cluster import joining
from agentrl.cluster.config import RayRuntimeConfig
from agentrl.cluster.places import RayPlaces
from agentrl.process.place import PlacesLostError

joining._HEAD_S = 5.0

async def watch():
    places = RayPlaces.open(RayRuntimeConfig(kind="ray", address=sys.argv[1]))
    print("up", flush=True)
    try:
        await places.watch()
    except PlacesLostError as error:
        print(error, flush=True)
    await places.close()

asyncio.run(watch())
"""


def test_a_run_that_loses_a_process_of_each_kind_and_a_node_ends_with_all_on_record(tmp_path: Path) -> None:
    shape = TINY_SHAPE.model_copy(update={"context_tokens": CONTEXT_TOKENS})
    model, rng = make_tiny_model(tmp_path / "model", shape=shape), random.Random(0)
    with VirtualCluster.start(NUM_NODES, NODE.cpus, shared=[tmp_path]) as cluster:
        storm = RayStorm.of(cluster, tmp_path / "run", model, OVERRIDES)
        with storm.working():
            for victim in VICTIMS:
                storm.strike(victim, rng)
            storm.cut_short()
    verdict = storm.run.verdict
    assert set(storm.recovery_s) == set(VICTIMS)
    assert (verdict.turns_lost, verdict.effects_twice, verdict.regenerated, verdict.ledger_gaps) == (0, 0, 0, 0)
    assert verdict.num_turns > 0
    assert storm.run.account == RunAccount()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("gcs_server", "the head of the Ray cluster at {} has not answered"),
        ("raylet", "this machine's node of the Ray cluster at {} has ended"),
    ],
    ids=["head", "own-node"],
)
def test_a_run_without_the_head_or_its_own_node_is_told_so_and_what_to_start(program: str, words: str) -> None:
    with VirtualCluster.start(0) as cluster:
        command = [sys.executable, "-c", WATCH, cluster.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "up\n"
            [pid] = programs_on(cluster.head, program)
            os.kill(pid, signal.SIGKILL)
            told = next((line for line in driver.stdout if "--resume" in line), "")  # Ray has much to say, too
            driver.kill()
    assert told.startswith(words.format(cluster.address))
    assert told.endswith("then the run by the same command with --resume\n")
