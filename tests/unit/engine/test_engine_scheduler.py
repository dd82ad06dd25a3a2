from __future__ import annotations

from pathlib import Path

import pytest
from stepping import make_scheduler, step

from agentrl.engine.model import ServedModel
from agentrl.engine.options import EngineOptions
from agentrl.engine.request import BadRequestError, DrawParams, Request
from agentrl.engine.scheduler import Scheduler
from agentrl.types.weights import PauseMode

PROMPTS = [[20, 31, 42, 53, 64, 75, 86, 97, 108, 119], [20, 31, 42], [99] * 6]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ServedModel:
    return ServedModel(EngineOptions(model=tiny_model, port=1, max_running_requests=2))


@pytest.fixture
def scheduler(model: ServedModel) -> Scheduler:
    """Two slots and four prompt tokens a step, so that most things take several steps."""
    return make_scheduler(model, 2, prefill_tokens=4)


def _requests(num_tokens: int = 5) -> list[Request]:
    params = [DrawParams(num_tokens, 1.0, 0, 1.0, frozenset(), seed) for seed in range(len(PROMPTS))]
    return [Request(f"r{n}", prompt, params[n], False, 0) for n, prompt in enumerate(PROMPTS)]


def _finish(scheduler: Scheduler, requests: list[Request]) -> None:
    for _ in range(200):
        if all(request.finish_reason for request in requests):
            return
        step(scheduler)
    raise AssertionError("requests do not end")


def _undisturbed(scheduler: Scheduler) -> list[Request]:
    requests = _requests()
    for request in requests:
        scheduler.submit(request)
    _finish(scheduler, requests)
    scheduler.flush()
    return requests


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
@pytest.mark.parametrize("num_steps", range(14))
def test_a_pause_after_any_step_changes_neither_tokens_nor_scores(
    scheduler: Scheduler, mode: PauseMode, num_steps: int
) -> None:
    expected = _undisturbed(scheduler)
    requests = _requests()
    for request in requests:
        scheduler.submit(request)
    for _ in range(num_steps):
        step(scheduler)
    scheduler.pause(mode)
    scheduler.resume()
    _finish(scheduler, requests)
    for request, other in zip(requests, expected, strict=True):
        assert request.output_ids == other.output_ids
        assert request.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert request.prompt_logprobs[1:] == pytest.approx(other.prompt_logprobs[1:], abs=1e-4)
        assert len(request.prompt_logprobs) == len(request.prompt_ids)


@pytest.mark.parametrize("num_steps", range(14))
def test_an_abort_after_any_step_leaves_aligned_partial_outputs(scheduler: Scheduler, num_steps: int) -> None:
    expected = _undisturbed(scheduler)
    requests = _requests()
    for request in requests:
        scheduler.submit(request)
    for _ in range(num_steps):
        step(scheduler)
    scheduler.abort(None)
    for request, other in zip(requests, expected, strict=True):
        num_drawn = len(request.output_ids)
        assert request.finish_reason is not None
        assert request.output_ids == other.output_ids[:num_drawn]
        assert len(request.logprobs) == num_drawn
        assert request.spans == request.kv_spans == ([["0.0", 0, num_drawn]] if num_drawn else [])
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.slots.num_rows) == (0, 0, 0)


@pytest.mark.parametrize("num_steps", range(7))
def test_a_retracted_request_goes_on_under_new_weights_without_stale_cache(
    scheduler: Scheduler, num_steps: int
) -> None:
    request = _requests()[0]
    request.score_from = None
    scheduler.submit(request)
    for _ in range(num_steps):
        step(scheduler)
    scheduler.pause(PauseMode.RETRACT)
    scheduler.loaded("0.1")
    scheduler.resume()
    _finish(scheduler, [request])
    assert [label for label, _, _ in request.spans][-1] == "0.1"
    assert request.spans == request.kv_spans
    assert request.cached_tokens == 0


def test_a_request_leaves_its_slot_and_its_id_when_it_ends(scheduler: Scheduler) -> None:
    first = _requests()[0]
    scheduler.submit(first)
    with pytest.raises(BadRequestError, match="duplicate request id in flight: r0"):
        scheduler.submit(_requests()[0])
    _finish(scheduler, [first])
    assert scheduler.slots.num_rows == 0
    scheduler.submit(_requests()[0])
    assert scheduler.num_waiting == 1
