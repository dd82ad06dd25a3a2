from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.storms.run_account import RunAccount
from tests.storms.worker_storm import found_without_tokens, kill_workers, metric

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
NUM_KILLS = 6


def test_a_run_whose_workers_are_killed_loses_nothing_and_does_nothing_twice(
    calling_model: Path, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    run = kill_workers(tmp_path / "storm", calling_model, NUM_KILLS, seed)
    verdict = run.verdict
    found = (verdict.turns_lost, verdict.effects_twice, verdict.regenerated, verdict.ledger_gaps)
    assert found == (0, 0, 0, 0), f"seed {seed}"
    assert run.account == RunAccount(), f"seed {seed}"
    assert metric(run, "workers/handed_over_total") > NUM_KILLS / 2, "hardly an episode was in a worker that was killed"
    assert verdict.num_turns > NUM_KILLS


def test_without_rising_tokens_a_fault_is_found(
    calling_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_UNPROTECTED", "")
    assert found_without_tokens(tmp_path / "unprotected", calling_model, seed=0) > 0
