"""Whatever ends in the midst of an episode on a server, nothing acts twice, and every episode has an end."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from agentrl.process.loop import run_async
from tests.storms.server_storm import MOST_UNPROTECTED_KILLS, storm

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
NUM_KILLS = 8


def test_episodes_on_a_server_act_once_whatever_ends(tiny_model: Path, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    verdict = run_async(storm(tmp_path, tiny_model, NUM_KILLS, seed))
    assert (verdict.effects_twice, verdict.lost, verdict.other) == (0, 0, []), f"seed {seed}"
    assert sum(verdict.kills.values()) == NUM_KILLS
    assert verdict.calls > verdict.episodes > 0


@pytest.mark.parametrize("protection", ["request_ids", "fencing"])
def test_without_a_protection_a_call_acts_twice(protection: str, tiny_model: Path, tmp_path: Path) -> None:
    verdict = run_async(storm(tmp_path, tiny_model, MOST_UNPROTECTED_KILLS, 0, protection))
    assert verdict.effects_twice > 0
