from __future__ import annotations

import random
from pathlib import Path

import pytest

from agentrl.process.crash_points import CRASH_POINTS
from tests.storms.kill_storm import found_without, kill_at_points, kill_at_random, kill_partners_at_random
from tests.storms.run_account import RunAccount

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]
NUM_KILLS = 5
NUM_KILLS_PARTNERS = 3


def test_killed_at_random_a_run_loses_nothing_and_does_nothing_twice(calling_model: Path, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    killed = kill_at_random(tmp_path / "random", calling_model, NUM_KILLS, seed)
    verdict = killed.verdict
    found = (verdict.turns_lost, verdict.effects_twice, verdict.regenerated, verdict.ledger_gaps)
    assert found == (0, 0, 0, 0), f"seed {seed}"
    assert killed.account == RunAccount(), f"seed {seed}"
    assert verdict.num_turns > NUM_KILLS, "hardly anything happened between the kills"


def test_killed_at_random_a_run_of_two_policies_loses_nothing_and_does_nothing_twice(
    calling_model: Path, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    killed = kill_partners_at_random(tmp_path / "partners", calling_model, NUM_KILLS_PARTNERS, seed)
    verdict = killed.verdict
    found = (verdict.turns_lost, verdict.effects_twice, verdict.regenerated, verdict.ledger_gaps)
    assert found == (0, 0, 0, 0), f"seed {seed}"
    assert killed.account == RunAccount(), f"seed {seed}"
    checkpoints = {path.parent.parent.name for path in killed.run.glob("checkpoints/*/*/progress.json")}
    assert checkpoints == {"main", "partner"}


def test_killed_at_every_crash_point_a_run_loses_nothing_and_does_nothing_twice(
    calling_model: Path, tmp_path: Path
) -> None:
    killed, missed = kill_at_points(tmp_path / "points", calling_model, CRASH_POINTS, seed=0)
    verdict = killed.verdict
    assert missed == []
    found = (verdict.turns_lost, verdict.effects_twice, verdict.regenerated, verdict.ledger_gaps)
    assert found == (0, 0, 0, 0)
    assert killed.account == RunAccount()


@pytest.mark.parametrize("protection", ["no_sync", "retry"])
def test_without_its_protection_the_loss_is_found(
    protection: str, calling_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_UNPROTECTED", "")
    assert found_without(protection, tmp_path / protection, calling_model, seed=0) > 0
