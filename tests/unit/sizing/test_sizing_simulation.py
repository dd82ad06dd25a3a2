from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from constant_times import constant, given
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from agentrl.sizing.config import load_latencies, rough_latencies
from agentrl.sizing.latencies import DecodeCurve
from agentrl.sizing.setup import ScorerSetup, Setup
from agentrl.sizing.simulation import Simulation, simulate
from agentrl.types.errors import ConfigError

ONE = Setup(places=1, group_size=1, groups_per_step=1, max_staleness=0)


def step_s(setup: Setup, steps: int = 30, **figures) -> float:
    return simulate(setup, constant(**figures), steps).step_s


def test_in_turn_a_step_takes_the_sum_of_its_parts():
    # 10 tokens at 10 tokens/s, then the step, the writing, the publication: 1 + 2 + 0.5 + 0.25.
    found = step_s(ONE, trainer_fixed_s=2, stage_s=0.5, publish_s=0.25)
    assert found == pytest.approx(3.75)


def test_side_by_side_a_step_takes_as_long_as_the_slower_part():
    ahead = replace(ONE, max_staleness=4)
    assert step_s(ahead, trainer_fixed_s=2, stage_s=0.5, publish_s=0.25) == pytest.approx(2.5)
    assert step_s(ahead, trainer_fixed_s=0.4, stage_s=0.1, publish_s=0.25) == pytest.approx(1.0)


def test_a_pause_costs_the_engine_its_length_for_each_version():
    ahead = replace(ONE, max_staleness=4)
    assert step_s(ahead, trainer_fixed_s=0.4, publish_s=0.25, pause_s=0.125) == pytest.approx(1.125)


def test_each_sequence_that_a_publication_interrupts_adds_to_its_pause():
    # Four at once get 40 tokens/s, 1 s a reply; a version comes each second and interrupts all four: 0.1 + 4 * 0.05.
    four = Setup(places=4, group_size=2, groups_per_step=2, max_staleness=8)
    times = {"decode": ((1, 10), (4, 40)), "trainer_fixed_s": 0.4, "publish_s": 0.1, "pause_s": 0.1}
    assert step_s(four, **times) == pytest.approx(1.1)
    assert step_s(four, **times, interrupt_s=0.05) == pytest.approx(1.3)


def test_sequences_of_an_engine_share_its_speed():
    # Four at once get 20 tokens/s together: 0.2 s a token, 2 s a reply, four episodes a step.
    four = Setup(places=4, group_size=2, groups_per_step=2, max_staleness=8)
    assert step_s(four, decode=((1, 10), (4, 20))) == pytest.approx(2.0)
    assert step_s(replace(four, engines=4), decode=((1, 10), (4, 20))) == pytest.approx(1.0)


def test_an_engine_without_a_slot_lets_replies_wait():
    four = Setup(places=4, group_size=2, groups_per_step=2, max_staleness=8)
    assert step_s(four, engine_slots=2, decode=((1, 10), (2, 20))) == pytest.approx(2.0)


def test_prefill_holds_up_what_the_engine_decodes_and_comes_again_with_new_weights():
    # 5 tokens of prompt at 0.1 s each before each reply of 1 s; weights come while it is under way, and it holds the
    # prompt and the 7 tokens that it decoded in 0.7 of the 1.2 s since it joined, 0.5 s of which were prefill.
    times = {"prompt_tokens": 5, "prefill_token_s": 0.1}
    assert step_s(ONE, **times) == pytest.approx(1.5)
    assert step_s(replace(ONE, max_staleness=4), publish_s=1.2, **times) == pytest.approx(1.5 + 0.1 * (5 + 7))


def test_an_environment_of_one_slot_serves_one_episode_after_the_other():
    # Two episodes a step, 3 s of tools each. Openings and last turns wait in the same line: it is empty for 1 s, in
    # which seven of eight episodes generate at once, behind every 21 s.
    two = Setup(places=8, group_size=2, groups_per_step=1, max_staleness=16)
    run = Simulation(two, constant(turns=2, step_s=3.0, environment_slots=1))
    run.run(29)
    # From the first round to the fifth: 7 episodes each.
    assert run.steps[16].ended_s - run.steps[2].ended_s == pytest.approx(4 * 22)
    assert step_s(two, turns=2, step_s=3.0, environment_slots=math.inf) < 3.0


def test_a_scorer_of_turns_that_is_slow_sets_the_pace():
    # Two turns of each of two episodes, one call at a time of one turn, 5 s each: 20 s a step.
    scored = Setup(
        places=4, group_size=2, groups_per_step=1, max_staleness=8, scorers={"prm": ScorerSetup(True, slots=1)}
    )
    found = simulate(scored, constant(turns=2, scorers={"prm": given(5.0)}), 30)
    assert found.step_s == pytest.approx(20.0, rel=0.01)
    batched = replace(scored, scorers={"prm": ScorerSetup(True, slots=1, batch=4)})
    assert simulate(batched, constant(turns=2, scorers={"prm": given(5.0)}), 30).step_s < 8.0


def test_ranks_and_passes_change_a_step_as_they_say():
    ahead = replace(ONE, max_staleness=4)
    times = {"tokens": 10, "trainer_token_s": 0.4}  # 4 s a step
    assert step_s(replace(ahead, ranks=2), scaling=1.0, **times) == pytest.approx(2.0)
    assert step_s(replace(ahead, ranks=4), scaling=0.5, **times) == pytest.approx(2.0)
    assert step_s(replace(ahead, passes=3), **times) == pytest.approx(12.0)


def test_shared_devices_generate_and_train_in_turn():
    # The engine's second stands still for the step's two.
    shared = replace(ONE, max_staleness=4, colocated=True)
    assert step_s(shared, trainer_fixed_s=2) == pytest.approx(3.0)


def test_staleness_of_a_trainer_that_is_the_bottleneck_is_the_bound():
    found = simulate(replace(ONE, places=8, max_staleness=3), constant(trainer_fixed_s=20), 30)
    assert (found.staleness_mean, found.staleness_p90, found.staleness_max) == (3.0, 3, 3)


@pytest.mark.parametrize(("tokens_per_s", "hours"), [(6300, 45 / 60), (1200, 3.7)])
def test_512_rollouts_of_32k_tokens_take_as_long_as_the_survey_says(tokens_per_s: float, hours: float):
    # It says 45 minutes for a model of 7B, 3.7 hours for one of 32B; one H100 each, in turn with the trainer.
    latencies = constant(decode=((512, tokens_per_s),), tokens=32 * 1024)
    found = simulate(Setup(places=512, group_size=8, groups_per_step=64, max_staleness=0), latencies, 3)
    assert found.step_s / 3600 == pytest.approx(hours, rel=0.05)


def test_a_curve_goes_on_along_its_ends():
    curve = DecodeCurve(((1, 50), (64, 1600)), "by hand")
    assert [curve.token_s(n) for n in (1, 64)] == pytest.approx([0.02, 0.04])
    assert 32 / curve.token_s(32) == pytest.approx(1073, rel=1e-3)
    assert curve.token_s(127) == pytest.approx(0.06)
    assert DecodeCurve(((64, 1600),), "by hand").token_s(128) == pytest.approx(2 * 64 / 1600)


SETUPS = st.builds(
    Setup,
    places=st.integers(1, 12),
    group_size=st.integers(1, 3),
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
    staleness=st.sampled_from(["mask_spans", "wait"]),
    engines=st.integers(1, 3),
)


@settings(max_examples=40)
@drawn(SETUPS, st.integers(0, 1000), st.floats(0, 0.4), st.floats(0.1, 20))
def test_the_bound_on_staleness_holds_whatever_the_lengths(setup: Setup, seed: int, dropped: float, trainer_s: float):
    spread = [
        "episodes.turns={median=2, p95=6}", "episodes.reply_tokens={median=20, p95=400}",
        f"episodes.dropped_groups={dropped}", f"trainer.fixed_s={trainer_s}",
    ]  # fmt: skip
    run = Simulation(setup, load_latencies(None, spread, rough_latencies()), seed)
    run.run(8)
    batch = setup.group_size * setup.groups_per_step
    assert run.admissions
    for admission in run.admissions:
        assert admission.running <= setup.places
        assert admission.running + admission.accepted <= (setup.max_staleness + admission.loaded + 1) * batch
    if setup.staleness == "wait":
        assert max(stale for step in run.steps for stale in step.tokens) <= setup.max_staleness


@settings(max_examples=40)
@drawn(SETUPS, st.integers(1, 4), st.floats(0.5, 50), st.floats(0, 5), st.floats(0, 5))
def test_more_engines_are_never_slower(setup: Setup, turns: int, tokens: float, step_s: float, trainer_s: float):
    latencies = constant(
        decode=((1, 10), (4, 20)), turns=turns, tokens=tokens, step_s=step_s, trainer_fixed_s=trainer_s, stage_s=0.1
    )
    seconds = [simulate(replace(setup, engines=n), latencies, 8).seconds for n in (1, 2, 4, 12)]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(seconds)), seconds


def test_the_same_seed_gives_the_same_run_and_another_one_another():
    setup, latencies = Setup(64, 8, 8, 4), rough_latencies()
    first, again, other = (simulate(setup, latencies, 6, seed) for seed in (0, 0, 1))
    assert first == again != other


def test_a_scorer_without_a_latency_is_named():
    with pytest.raises(ConfigError, match=r"scorer 'prm'.*--set scorers\.prm\.call_s"):
        simulate(replace(ONE, scorers={"prm": ScorerSetup(True)}), constant(), 3)
