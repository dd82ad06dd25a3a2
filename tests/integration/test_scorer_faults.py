"""Whatever a scorer of turns does, no run hangs and no score is invented or joined to another turn."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from agentrl.process.loop import run_async
from tests.storms.scorer_faults import FAULTS, fall_behind, kill, strike

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
STRUCK = [fault for fault in FAULTS if fault not in ("behind", "killed")]


@pytest.mark.parametrize("fault", STRUCK)
def test_a_fault_of_a_scorer_costs_its_batch_and_no_more(fault: str, tiny_model: Path, tmp_path: Path) -> None:
    verdict = run_async(strike(tmp_path / "storm", tiny_model, fault, 1))
    assert verdict.num_faults == 0, verdict
    assert verdict.struck == 1


@pytest.mark.parametrize("fault", STRUCK)
def test_without_its_protection_the_fault_is_found(fault: str, tiny_model: Path, tmp_path: Path) -> None:
    assert run_async(strike(tmp_path / "storm", tiny_model, fault, 1, is_protected=False)).num_faults > 0


def test_a_scorer_that_falls_behind_holds_up_admission_and_not_the_episodes(tiny_model: Path, tmp_path: Path) -> None:
    verdict = run_async(fall_behind(tmp_path / "storm", tiny_model))
    assert verdict.num_faults == 0, verdict


def test_without_waiting_for_room_the_line_grows(tiny_model: Path, tmp_path: Path) -> None:
    assert run_async(fall_behind(tmp_path / "storm", tiny_model, is_protected=False)).overflow > 0


def test_a_killed_run_asks_about_nothing_that_is_on_record(tiny_model: Path, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    verdict = kill(tmp_path / "storm", tiny_model, 2, seed)
    assert verdict.num_faults == 0, f"seed {seed}: {verdict}"
    assert verdict.said["on_record"] > 0


def test_a_start_that_knows_no_scores_asks_again(tiny_model: Path, tmp_path: Path) -> None:
    assert kill(tmp_path / "storm", tiny_model, 1, 0, is_protected=False).asked_twice > 0
