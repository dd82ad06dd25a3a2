"""Whole runs on the nodes of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.testing.tiny import make_tiny_model
from tests.integration import runs

pytestmark = pytest.mark.timeout(600)
STEPS = 3


@pytest.fixture(scope="session")
def model(shared: Path) -> Path:
    return make_tiny_model(shared / "model")


def test_a_run_whose_engines_workers_and_ranks_are_on_two_nodes_trains_what_it_plays(cluster, shared, model):
    folder = shared / "whole"
    folder.mkdir()
    overrides = (
        f"steps={STEPS}",
        "runtime.kind=ray",
        f"runtime.address={cluster.address}",
        "policies.main.engine.kind=embedded",
        "policies.main.engine.count=2",
        "policies.main.publish.transport.kind=broadcast",
        "rollout.workers=2",
    )
    result = runs.agentrl(*runs.train_arguments(folder, model, *overrides))
    assert result.returncode == 0, result.stdout + result.stderr
    run = folder / "runs" / "test-seed0"
    runs.assert_whole(run)
    runs.assert_archived_as_in_ledger(run)
    runs.assert_trained(run, STEPS * 8)
