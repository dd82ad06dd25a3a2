"""Whatever breaks or is published while programs call the gateway, each call is drawn once, where it belongs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentrl.process.loop import run_async
from agentrl.rollouts.record import EpisodeRecord
from agentrl.testing.builders import build_ticket
from agentrl.types.episode import Agent, Episode, SampledColumns
from agentrl.types.version import PolicyVersion, VersionSpan
from tests.storms.deliveries import Delivery, check_episode
from tests.storms.gateway_storm import StormPlan, storm

NUM_CALLS = 60
MOST_UNPROTECTED_CALLS = 500
NUM_PUBLISHES = 3
PROMPT, SECOND_PROMPT = [1, 2, 3], [1, 2, 3, 7, 8, 9]
SPANS = (VersionSpan(PolicyVersion(0, 1), 0, 1), VersionSpan(PolicyVersion(0, 2), 1, 2))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_under_a_storm_no_client_sees_an_error_and_tokens_versions_and_branches_are_right(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    report = run_async(storm(StormPlan(tmp_path / "storm", NUM_CALLS, NUM_PUBLISHES, seed, num_at_once=3)))
    found = report.client_errors + report.faults.notes
    assert (len(report.client_errors), report.faults.tokens_wrong, report.faults.branches_wrong) == (0, 0, 0), (
        f"seed {seed}: {found}"
    )
    assert report.calls >= NUM_CALLS
    assert report.publishes >= NUM_PUBLISHES
    assert report.aborts > 0


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("protection", ["retries"])  # the benchmark tries all
def test_without_a_protection_the_storm_finds_the_fault(protection: str, tmp_path: Path) -> None:
    report = run_async(storm(StormPlan(tmp_path / "storm", MOST_UNPROTECTED_CALLS, 0, 0, protection, num_at_once=2)))
    assert report.faults.branches_wrong > 0


def two_turns() -> tuple[Episode, list[Delivery]]:
    """A reply in two parts by two versions, and another behind it."""
    record = EpisodeRecord(build_ticket(), (Agent("agent", "main"),))
    columns = SampledColumns(np.asarray([-0.5, -0.25], np.float32), SPANS, SPANS)
    opening = record.add_node(None, "agent", np.asarray(PROMPT, np.int32))
    first = record.add_node(opening.index, "agent", np.asarray([7, 8], np.int32), columns)
    piece = record.add_node(first.index, "agent", np.asarray([9], np.int32))
    record.add_node(piece.index, "agent", np.asarray([5, 6], np.int32), columns)
    deliveries = [
        Delivery("a", 1, PROMPT, [7], [-0.5], ["0.1"], "abort"),
        Delivery("b", 1, [*PROMPT, 7], [8], [-0.25], ["0.2"], "stop"),
        Delivery("c", 1, SECOND_PROMPT, [5, 6], [-0.5, -0.25], ["0.1", "0.2"], "stop"),
    ]
    return record.close(0.0), deliveries


def test_an_episode_of_what_was_delivered_has_no_fault() -> None:
    episode, deliveries = two_turns()
    faults = check_episode(episode, deliveries)
    assert (faults.tokens_wrong, faults.branches_wrong, faults.notes) == (0, 0, [])


def test_what_an_episode_has_lost_or_has_twice_is_counted_by_tokens() -> None:
    episode, deliveries = two_turns()
    lost = check_episode(episode, [*deliveries, Delivery("d", 2, PROMPT, [4, 4, 4], [0.0] * 3, ["0.1"] * 3, "stop")])
    assert (lost.tokens_lost, lost.tokens_twice, lost.branches_wrong) == (3, 0, 1)
    twice = check_episode(episode, deliveries[:2])
    assert (twice.tokens_lost, twice.tokens_twice) == (0, 2)
    cut = check_episode(episode, [*deliveries[:2], replace(deliveries[2], token_ids=[5, 4, 6])])
    assert (cut.tokens_lost, cut.tokens_twice) == (1, 0)


def test_a_token_under_another_version_or_log_probability_is_counted() -> None:
    episode, deliveries = two_turns()
    faults = check_episode(episode, [*deliveries[:2], replace(deliveries[2], versions=["0.2", "0.2"], logprobs=[0, 0])])
    assert (faults.versions_wrong, faults.logprobs_wrong) == (1, 2)


def test_a_reply_that_hangs_elsewhere_than_its_prompt_says_is_a_wrong_branch() -> None:
    episode, deliveries = two_turns()
    whole = np.asarray([*PROMPT, 7, 8, 9], np.int32)
    nodes = (
        *episode.nodes[:2],
        replace(episode.nodes[2], parent=None, token_ids=whole),
        episode.nodes[3],
    )
    assert check_episode(replace(episode, nodes=nodes), deliveries).branches_wrong == 2
