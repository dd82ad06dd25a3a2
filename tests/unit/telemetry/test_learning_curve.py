from __future__ import annotations

import pytest

from agentrl.telemetry.curve import smoothed


def test_a_step_with_one_episode_counts_as_one_episode() -> None:
    means = [(1, 1.0), (2, 0.0), (4, 0.5)]
    episodes = {1: 99.0, 2: 1.0, 4: 100.0, 3: 0.0}
    assert smoothed(means, episodes) == [(1, 1.0), (2, pytest.approx(0.99)), (4, pytest.approx(0.745))]


def test_only_the_last_five_steps_count() -> None:
    means = [(step, float(step == 1)) for step in range(1, 13)]
    values = dict(smoothed(means, dict.fromkeys(range(1, 13), 8.0)))
    assert (values[5], values[6]) == (pytest.approx(0.2), 0.0)
