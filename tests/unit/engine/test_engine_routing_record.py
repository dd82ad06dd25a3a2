from __future__ import annotations

import numpy as np
import pytest
from stepping import make_scheduler, step

from agentrl.engine.model import ServedModel
from agentrl.engine.options import EngineOptions
from agentrl.engine.request import DrawParams, Request
from agentrl.engine.routing import has_experts
from agentrl.engine.scheduler import PauseMode, Scheduler
from agentrl.testing.tiny_moe import NUM_LAYERS, TOP_K, make_tiny_moe_model

PROMPT = [20, 31, 42, 53, 64, 75, 86, 97, 108, 119]
NUM_TOKENS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = make_tiny_moe_model(tmp_path_factory.mktemp("moe") / "model")
    return ServedModel(EngineOptions(model=folder, port=1, max_running_requests=2))


@pytest.fixture
def scheduler(model: ServedModel) -> Scheduler:
    return make_scheduler(model, 2, prefill_tokens=4)


def _request() -> Request:
    params = DrawParams(NUM_TOKENS, 1.0, 0, 1.0, frozenset(), 7)
    return Request("r0", PROMPT, params, False, None, routed_from=0)


def _finish(scheduler: Scheduler, request: Request) -> np.ndarray:
    for _ in range(500):
        if request.finish_reason:
            assert request.routing is not None
            return request.routing
        step(scheduler)
    raise AssertionError("the request does not end")


def _undisturbed(scheduler: Scheduler) -> np.ndarray:
    request = _request()
    scheduler.submit(request)
    routing = _finish(scheduler, request)
    scheduler.flush()
    assert routing.shape == (len(PROMPT) + NUM_TOKENS - 1, NUM_LAYERS, TOP_K)
    return routing


@pytest.mark.parametrize("num_steps", range(8))
def test_an_aborted_request_keeps_the_experts_of_what_it_computed(scheduler: Scheduler, num_steps: int) -> None:
    expected = _undisturbed(scheduler)
    request = _request()
    scheduler.submit(request)
    for _ in range(num_steps):
        step(scheduler)
    scheduler.abort(None)
    num_known = 0 if request.routing is None else len(request.routing)
    assert num_known == [0, 4, 8, 10, 11, 12, 13, 14][num_steps]
    assert num_known == 0 or np.array_equal(request.routing, expected[:num_known])


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_a_request_that_is_aborted_while_it_computes_its_context_again_loses_no_experts(
    scheduler: Scheduler, num_steps: int
) -> None:
    expected = _undisturbed(scheduler)
    request = _request()
    scheduler.submit(request)
    for _ in range(num_steps):
        step(scheduler)
    scheduler.pause(PauseMode.RETRACT)
    num_before = 0 if request.routing is None else len(request.routing)
    scheduler.flush()
    scheduler.resume()
    step(scheduler)
    scheduler.abort(None)
    assert request.routing is not None
    assert len(request.routing) >= num_before
    assert np.array_equal(request.routing, expected[: len(request.routing)])


def test_rows_that_grow_and_are_copied_keep_their_experts(scheduler: Scheduler) -> None:
    params = DrawParams(150, 1.0, 0, 1.0, frozenset(), 7)
    long = Request("long", PROMPT, params, False, None, routed_from=0)
    scheduler.submit(long)
    for _ in range(30):
        step(scheduler)
    branch = Request("branch", PROMPT + long.output_ids[:20], params, False, None, routed_from=0)
    scheduler.submit(branch)
    _finish(scheduler, long)
    routing = _finish(scheduler, branch)
    assert branch.cached_tokens == len(PROMPT) + 19
    assert np.array_equal(routing[: branch.cached_tokens], long.routing[: branch.cached_tokens])
    again = Request("again", PROMPT + long.output_ids[:-1], params, False, 0, routed_from=0)
    scheduler.submit(again)
    assert np.array_equal(_finish(scheduler, again)[: len(long.routing)], long.routing)


def test_a_dense_model_has_no_experts(tiny_model: object) -> None:
    dense = ServedModel(EngineOptions(model=tiny_model, port=1, max_running_requests=2))
    assert dense.routing is None
    assert not has_experts(dense.network)
