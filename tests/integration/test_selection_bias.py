"""Short simulated runs; `tests.benchmarks.selection_bias` measures the same in long ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agentrl.buffer.reports import bias, closed_cohort
from agentrl.testing.clock import run_virtual
from agentrl.testing.tiny import tiny_chat
from tests.storms.simulation import ATTEMPTS, NaiveEngine, Simulation, TailEngine, run_config, simulate

STEPS = 14


@pytest.fixture
def play(tiny_model: Path, tmp_path: Path):
    chat = tiny_chat(tiny_model)

    def run(engine_kind=TailEngine, max_attempts: int = 1, **buffer) -> Simulation:
        config = run_config(tiny_model, tmp_path, STEPS, seed=0, group_size=4, groups_per_step=8, **buffer)
        return run_virtual(simulate(config, chat, engine_kind, max_attempts))

    return run


def test_every_episode_of_a_closed_cohort_is_trained_whole_under_wait(play):
    [report] = bias(play(max_staleness=2, staleness="wait").lines)
    assert report.num_trained == report.num_dispatched > 200
    ratios = {c.measure: c.ratio for c in report.comparisons}
    assert (ratios["length"], ratios["trained tokens"]) == (1.0, 1.0)


def test_masking_takes_tokens_but_hardly_any_episode(play):
    comparisons = {c.measure: c for c in bias(play(max_staleness=4).lines)[0].comparisons}
    assert 0.97 < comparisons["length"].ratio < 1.03
    assert comparisons["length"].ks < 0.03
    assert comparisons["trained tokens"].ratio < comparisons["length"].ratio


def test_a_window_keeps_fast_groups_near_slow_ones_and_fewer_tokens_grow_too_old(play):
    def masked_fraction(**buffer) -> float:
        cohort = closed_cohort(play(max_staleness=2, **buffer).lines)
        return sum(line.masked_tokens for line in cohort) / sum(line.sampled_tokens for line in cohort)

    assert masked_fraction(order_window=8) < 0.7 * masked_fraction()


def test_a_system_that_discards_unfinished_episodes_trains_the_short_ones(play):
    simulation = play(NaiveEngine, ATTEMPTS, max_staleness=2)
    cohort = closed_cohort(simulation.lines)
    lengths = {outcome: [] for outcome in ("trained", "dropped")}
    for line in cohort:
        lengths[line.outcome].append(simulation.intended_lengths[line.episode_id])
    assert {line.reason for line in cohort if line.outcome == "dropped"} == {"engine_discarded"}
    assert np.mean(lengths["trained"]) < 0.6 * np.mean(lengths["dropped"])
