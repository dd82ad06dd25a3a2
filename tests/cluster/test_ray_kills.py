"""One of each kind is killed of a run on a cluster of its own; the full storm is the benchmark `ray_kill_storm`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model
from agentrl.testing.virtual_cluster import VirtualCluster
from tests.storms.ray_kills import NODE, NUM_NODES, RayStorm, Victim
from tests.storms.run_account import RunAccount

pytestmark = pytest.mark.timeout(1200)
CONTEXT_TOKENS = 4096
OVERRIDES = (
    "steps=100000",
    "scaffold.name=tests.storms.kill_plugins:Scripted",
    f"rollout.limits={{max_turns = 4, max_context_tokens = {CONTEXT_TOKENS}, max_reply_tokens = 24}}",
)
# And the driver, at last.
VICTIMS = (Victim.WORKER, Victim.ENGINE_ACTOR, Victim.RAYLET, Victim.TRAINER, Victim.NODE)


def test_a_run_that_loses_a_process_of_each_kind_and_two_nodes_ends_with_all_on_record(tmp_path: Path) -> None:
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
