from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.storms.run_account import RunAccount
from tests.storms.worker_storm import IN_SANDBOX, found_without_effect_ids, kill_workers, metric

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
NUM_KILLS = 6


def test_workers_that_are_killed_while_a_sandbox_acts_do_nothing_twice(calling_model: Path, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    run = kill_workers(tmp_path / "storm", calling_model, NUM_KILLS, seed, IN_SANDBOX)
    verdict = run.verdict
    found = (verdict.turns_lost, verdict.effects_twice, verdict.regenerated, verdict.ledger_gaps)
    assert found == (0, 0, 0, 0), f"seed {seed}"
    assert run.account == RunAccount(), f"seed {seed}"
    assert metric(run, "workers/handed_over_total") > NUM_KILLS / 2, "hardly an episode was in a worker that was killed"
    assert (tmp_path / "storm" / "count.txt").read_text().count("\n") > NUM_KILLS, "the sandboxes have counted nothing"


def test_without_ids_of_effects_a_command_runs_twice(calling_model: Path, tmp_path: Path) -> None:
    assert found_without_effect_ids(tmp_path / "unprotected", calling_model, seed=0) > 0
