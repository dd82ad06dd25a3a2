from __future__ import annotations

import pytest
from engine_server import EngineCalls

from tests.storms.abort_storm import Storm, StormPlan, StormReport
from tests.storms.token_verdict import count_common

pytestmark = pytest.mark.long

NUM_ABORTS = 500
NUM_ABORTS_UNPROTECTED = 100
NUM_ABORTS_DRAINED = 150
MAX_DRAIN_S = 0.1


async def _blow(engine: EngineCalls, num_aborts: int, max_drain_s: float = 0.0, **faults: bool) -> StormReport:
    client = engine.server.client()
    models = engine.server.model, engine.server.other_model
    plan = StormPlan(models, num_aborts, num_sessions=12, max_drain_s=max_drain_s)
    report = await Storm(client, plan, **faults).run()
    await client.close()
    return report


@pytest.mark.slow
async def test_a_storm_of_aborts_loses_no_token_and_no_span_lies(engine: EngineCalls) -> None:
    report = await _blow(engine, NUM_ABORTS)
    assert report.aborts >= NUM_ABORTS
    assert report.aborts_with_tokens > 20
    assert report.publishes > 10
    assert (report.tokens_lost, report.tokens_twice) == (0, 0)
    assert report.max_gap < 1e-3


@pytest.mark.slow
async def test_a_storm_over_an_engine_that_drains_loses_no_token_and_no_span_lies(engine: EngineCalls) -> None:
    report = await _blow(engine, NUM_ABORTS_DRAINED, MAX_DRAIN_S)
    assert report.drained > 0
    assert report.cut > 0
    assert report.aborts_with_tokens > 20
    assert report.publishes > 2
    assert (report.tokens_lost, report.tokens_twice) == (0, 0)
    assert report.max_gap < 1e-3


async def test_the_storm_finds_what_is_lost_when_partial_outputs_are_dropped(engine: EngineCalls) -> None:
    assert (await _blow(engine, NUM_ABORTS_UNPROTECTED, is_forgetful=True)).tokens_lost > 0


async def test_the_storm_finds_what_is_mislabelled_when_the_clients_clock_names_versions(engine: EngineCalls) -> None:
    assert (await _blow(engine, NUM_ABORTS_UNPROTECTED, is_clocked=True)).max_gap > 0.01


@pytest.mark.parametrize(
    ("given", "kept", "common"),
    [([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3, 4], [1, 4], 2), ([1, 2], [1, 2, 1, 2], 2), ([1, 2], [3], 0)],
)
def test_lost_and_repeated_tokens_are_what_two_sides_do_not_share(given: list, kept: list, common: int) -> None:
    assert count_common(given, kept) == common
