from __future__ import annotations

import dataclasses

import pytest
from recording_engine import MANIFEST, NEW, OLD, RecordingEngine

from agentrl.inference.fleet import Fleet
from agentrl.testing.clock import run_virtual
from agentrl.types.batch import Canary, WeightsManifest
from agentrl.types.errors import Boundary, EngineBusyError, EpisodeError
from agentrl.weights.config import PublishConfig
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import StagedPublisher

# The engine may be 0.05 nats off; 5 and 9 are so near to each other that it may find either the likeliest.
CANARY = Canary((5, 6, 7), (-1.0, -2.0), (5, 9, 4), (-0.50, -0.56, -3.0))
FLAT = Canary((5, 6, 7), (-1.0, -2.0), (5, 9), (-5.0, -5.02))
FIRST = WeightsManifest("main", OLD, "/model", {}, 0, CANARY)
DROPPED = EpisodeError(Boundary.ENGINE, "unreachable", "reset")
FOREIGN = EpisodeError(Boundary.CONTRACT, "engine.identity", "its id is 'x'")
REFUSED = EpisodeError(Boundary.ENGINE, "refused", "HTTP 400")


def _engine(*draws: tuple[int, float] | EpisodeError) -> RecordingEngine:
    engine = RecordingEngine("x")
    engine.scores = [-1.0, -2.0]
    engine.draws = list(draws)
    return engine


def _published(engine: RecordingEngine, canary: Canary = CANARY) -> tuple[list[tuple[int, float] | None], str]:
    """The tokens of the receipts, and why the engine does not serve."""

    async def run() -> tuple[list[tuple[int, float] | None], str]:
        good = _engine(*zip(canary.next_ids[:1], canary.next_logprobs[:1], strict=True))
        good.name = "good"
        fleet = Fleet([engine, good], OLD)  # type: ignore[list-item]
        publisher = StagedPublisher(fleet, DiskTransport(), PublishConfig(patience_s=60.0), FIRST)
        receipts = await publisher.publish(dataclasses.replace(MANIFEST, canary=canary))
        return [r.sentinel for r in receipts if r.engine == "x"], fleet.aside.get("x", "")

    return run_virtual(run())


@pytest.mark.parametrize("draw", [(5, -0.5), (5, -0.549), (5, -0.451), (9, -0.52)])
def test_a_token_that_the_trainer_finds_likeliest_within_the_bound_is_the_receipts(draw: tuple[int, float]) -> None:
    (sentinel,), reason = _published(_engine(draw))
    assert sentinel == (draw[0], pytest.approx(draw[1]))
    assert reason == ""


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        ((4, -3.0), "drew token 4 behind the canary and gave it -3.0000 nats, where the trainer gives it -3.0000"),
        ((5, -0.56), "gave it -0.5600 nats"),
        ((5, -0.44), "gave it -0.4400 nats"),
        ((9, -0.49), "gave it -0.4900 nats, where the trainer gives it -0.5600"),
        ((77, -0.5), "the trainer gives it less than -3.0000 and token 5 the most, -0.5000"),
        ((5, float("nan")), "nan"),
    ],
)
def test_a_token_that_the_published_weights_do_not_draw_disproves_the_engine(
    draw: tuple[int, float], message: str
) -> None:
    sentinels, reason = _published(_engine(draw))
    assert sentinels == []
    assert reason.startswith("canary of version 0.4 failed: drew token")
    assert message in reason


@pytest.mark.parametrize(("logprob", "is_right"), [(-4.98, True), (-5.04, True), (-5.06, False), (-4.96, False)])
def test_a_token_beyond_the_list_may_be_the_likeliest_where_many_are_about_equal(
    logprob: float, is_right: bool
) -> None:
    sentinels, _ = _published(_engine((300, logprob)), FLAT)
    assert bool(sentinels) == is_right


def test_a_token_of_other_weights_than_the_published_disproves_the_engine() -> None:
    engine = _engine()
    engine.writes = OLD
    assert "drew a token behind the canary under version 0.3" in _published(engine)[1]


def test_the_token_is_asked_for_as_rollouts_ask_and_after_the_engine_generates_again() -> None:
    engine = _engine()
    _published(engine)
    (request,) = engine.drawn
    assert (request.prompt_ids.tolist(), request.max_new_tokens, request.expects) == ([5, 6, 7], 1, NEW)
    assert request.sampling.temperature == 0.0
    assert engine.calls[:4] == ["pause", "swap", "receipt", "resume"]
    assert set(engine.calls[4:]) == {"score", "generate"}


@pytest.mark.parametrize("failure", [DROPPED, FOREIGN, EngineBusyError("full", 3.0)])
def test_a_token_that_got_lost_is_asked_for_again(failure: EpisodeError) -> None:
    engine = _engine(failure, failure)
    assert _published(engine)[1] == ""
    assert engine.calls.count("generate") == 3


@pytest.mark.parametrize(("failures", "tries"), [([DROPPED] * 3, 3), ([REFUSED], 1)])
def test_an_engine_that_draws_no_token_is_set_aside(failures: list[EpisodeError], tries: int) -> None:
    engine = _engine(*failures)
    assert "engine x drew no token behind the canary: " in _published(engine)[1]
    assert engine.calls.count("generate") == tries


def test_an_engine_that_only_scores_rightly_is_found_by_what_it_draws() -> None:
    engine = _engine((400, -0.01))
    assert "drew token 400" in _published(engine)[1]


def test_a_canary_that_does_not_say_what_follows_asks_for_no_token() -> None:
    engine = _engine()
    assert _published(engine, Canary((5, 6, 7), (-1.0, -2.0))) == ([None], "")
    assert "generate" not in engine.calls
