"""How scores go with outcomes: the correlation by hand, and an alarm when they part."""

from __future__ import annotations

import logging
from statistics import correlation as by_python

import pytest

from agentrl.scoring.trends import ScoreTrends, correlation
from agentrl.testing.scorers import ScriptedConfig
from agentrl.types.errors import AgentRLError
from agentrl.types.turn_score import TurnScore
from tests.unit.scoring.scoring_parts import a_turn


def trends(action: str = "warn", episodes: int = 16) -> ScoreTrends:
    return ScoreTrends(ScriptedConfig(name="prm", divergence={"action": action, "episodes": episodes}))


def scores(*values: float) -> list[TurnScore]:
    return [TurnScore(a_turn(number).key, "v", value) for number, value in enumerate(values)]


def parting(found: ScoreTrends, num: int = 16) -> None:
    """Values rise from about .4 to .7, outcomes fall from about .8 to .5."""
    for number in range(num):
        late, jitter = number >= num // 2, 0.02 * (number % 2)
        found.add(scores((0.7 if late else 0.4) + jitter), (0.5 if late else 0.8) - jitter)


def test_correlation_is_pearsons() -> None:
    first, second = [1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 4.0, 3.0]
    # Deviations (-1.5, -.5, .5, 1.5) and (-.5, -1.5, 1.5, .5): 3 / 5.
    assert correlation(first, second) == pytest.approx(0.6)
    assert correlation(first, [0.3, 0.1, -0.7, 0.2]) == pytest.approx(by_python(first, [0.3, 0.1, -0.7, 0.2]))
    assert correlation(first, [1.0] * 4) is None


def test_metrics_are_of_the_means_of_episodes() -> None:
    found = trends()
    found.add(scores(0.0, 1.0), 1.0)
    assert found.metrics() == {}
    found.add(scores(0.2), 0.0)
    found.add(scores(0.1, 0.3, 0.5), 0.5)
    metrics = found.metrics()
    assert metrics["scorer/prm/value_mean"] == pytest.approx((0.5 + 0.2 + 0.3) / 3)
    assert metrics["scorer/prm/outcome_correlation"] == pytest.approx(by_python([0.5, 0.2, 0.3], [1.0, 0.0, 0.5]))


def test_what_was_not_said_counts_for_nothing() -> None:
    found = trends()
    found.add([TurnScore(a_turn(0).key, "v", prior=0.3)], 1.0)
    found.add(scores(0.3), None)
    found.add([], 1.0)
    assert found.metrics() == {}


def test_an_alarm_warns_once_for_as_long_as_half_of_the_episodes(caplog: pytest.LogCaptureFixture) -> None:
    found = trends()
    with caplog.at_level(logging.WARNING):
        parting(found)
        parting_on = [record for record in caplog.records if "learns to please the scorer" in record.message]
        assert len(parting_on) == 1
        assert "from 0.410 to 0.710 while the outcome fell from 0.790 to 0.490" in parting_on[0].message
        for _ in range(7):
            found.add(scores(0.7), 0.5)
    assert len(caplog.records) == 1
    assert found.metrics()["scorer/prm/divergence_alarms_total"] == 1.0


def test_an_alarm_stops_a_run_that_asks_for_it() -> None:
    with pytest.raises(AgentRLError, match="scorer 'prm': over the last 16 episodes its value rose"):
        parting(trends("stop"))


@pytest.mark.parametrize(
    ("value", "outcome"),
    [((0.4, 0.7), (0.5, 0.8)), ((0.7, 0.4), (0.8, 0.5)), ((0.4, 0.4), (0.8, 0.5)), ((0.4, 0.7), (0.8, 0.8))],
)
def test_there_is_no_alarm_unless_both_part(value: tuple[float, float], outcome: tuple[float, float]) -> None:
    found = trends("stop")
    for number in range(32):
        jitter = 0.02 * (number % 2)
        found.add(scores(value[number >= 16] + jitter), outcome[number >= 16] - jitter)
    assert found.metrics()["scorer/prm/divergence_alarms_total"] == 0.0


def test_noise_of_the_size_of_the_change_raises_no_alarm() -> None:
    found = trends("stop")
    for number in range(16):
        late, noise = number >= 8, 0.5 * (-1) ** number
        found.add(scores(0.5 + noise + 0.05 * late), 0.5 - noise - 0.05 * late)


def test_nobody_is_told_who_does_not_want_to_know(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parting(trends("ignore"))
    assert caplog.records == []
