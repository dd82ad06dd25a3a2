from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl.engine.forward import Computed, ForwardPass, PassRunner
from agentrl.engine.model import ServedModel
from agentrl.engine.options import EngineOptions, StepOptions
from agentrl.engine.request import BadRequestError, DrawParams, Request, UnwellError
from agentrl.engine.scheduler import PauseMode, Scheduler
from agentrl.engine.server import EngineServer

_DEADLINE_S = 20.0


class HeldSteps:
    """An engine whose steps wait, each before its forward pass, until they are let go."""

    def __init__(self, server: EngineServer) -> None:
        self.server, self.scheduler = server, server.scheduler
        self._began = threading.Semaphore(0)
        self._may_go = threading.Semaphore(0)
        self._forward = self.scheduler.model.forward
        self.scheduler.model.forward = self._held  # type: ignore[method-assign]

    def _held(self, *arguments: Any) -> Any:
        self._began.release()
        assert self._may_go.acquire(timeout=_DEADLINE_S)
        return self._forward(*arguments)

    async def until_computing(self) -> None:
        assert await asyncio.to_thread(self._began.acquire, timeout=_DEADLINE_S)

    async def is_computing_within(self, seconds: float) -> bool:
        return await asyncio.to_thread(self._began.acquire, timeout=seconds)

    def let_go(self, steps: int = 1) -> None:
        self._may_go.release(steps)

    async def call(self, path: str, **body: Any) -> Any:
        return await self.server.control_routes()[path](body)


@pytest.fixture
def server(tiny_model: Path) -> EngineServer:
    options = EngineOptions(model=tiny_model, port=1, max_running_requests=2, steps=StepOptions(long_step_s=0.0))
    return EngineServer(options)


@asynccontextmanager
async def _stepping(server: EngineServer) -> AsyncIterator[HeldSteps]:
    steps = HeldSteps(server)
    loop = asyncio.create_task(server.scheduler.run())
    try:
        async with asyncio.timeout(_DEADLINE_S):
            yield steps
    finally:
        steps.let_go(1000)
        loop.cancel()


def _request(rid: str) -> Request:
    return Request(rid, [20, 31, 42], DrawParams(50, 1.0, 0, 1.0, frozenset(), 7), False, None)


async def _few_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_requests_and_questions_are_taken_while_a_step_is_computed(server: EngineServer) -> None:
    async with _stepping(server) as steps:
        steps.scheduler.submit(_request("first"))
        await steps.until_computing()
        steps.scheduler.submit(_request("second"))
        info = server.views()["/model_info"]()
    assert (info["num_running"], info["num_waiting"]) == (1, 1)


async def test_an_engine_whose_step_does_not_end_is_unwell_until_it_does(tiny_model: Path) -> None:
    options = EngineOptions(model=tiny_model, port=1, steps=StepOptions(long_step_s=0.0, hung_step_s=1e-6))
    server = EngineServer(options)
    health = server.views()["/health"]
    async with _stepping(server) as steps:
        assert health() == {"status": "ok"}
        steps.scheduler.submit(_request("first"))
        await steps.until_computing()
        with pytest.raises(UnwellError, match="start the engine anew"):
            health()
        steps.let_go(1000)
        while steps.scheduler.num_running:
            await asyncio.sleep(0)
        assert health() == {"status": "ok"}


async def test_an_abort_waits_for_the_step_under_way_and_keeps_its_token(server: EngineServer) -> None:
    async with _stepping(server) as steps:
        request = _request("first")
        steps.scheduler.submit(request)
        await steps.until_computing()
        steps.let_go()
        await steps.until_computing()
        abort = asyncio.create_task(steps.call("/abort_request", rid="first"))
        await _few_turns()
        assert not abort.done()
        assert request.finish_reason is None
        steps.let_go()
        await abort
    assert request.finish_reason == {"type": "abort", "message": "Aborted"}
    assert len(request.output_ids) == 2


async def test_a_continuation_does_not_overtake_the_pause_before_it(server: EngineServer) -> None:
    async with _stepping(server) as steps:
        steps.scheduler.submit(_request("first"))
        await steps.until_computing()
        calls = [
            asyncio.create_task(steps.call("/pause_generation", mode="in_place")),
            asyncio.create_task(steps.call("/continue_generation")),
        ]
        await _few_turns()
        steps.let_go()
        await asyncio.gather(*calls)
        assert steps.scheduler.pause_mode is None
        await steps.until_computing()


async def test_an_engine_that_is_paused_computes_nothing_until_it_goes_on(server: EngineServer) -> None:
    async with _stepping(server) as steps:
        request = _request("first")
        steps.scheduler.submit(request)
        await steps.until_computing()
        pause = asyncio.create_task(steps.call("/pause_generation", mode="in_place"))
        await _few_turns()
        steps.let_go()
        await pause
        num_drawn = len(request.output_ids)
        assert not await steps.is_computing_within(0.2)
        assert (num_drawn, len(request.output_ids)) == (1, 1)
        await steps.call("/continue_generation")
        await steps.until_computing()


async def test_a_client_that_hangs_up_during_a_step_has_its_request_ended_behind_it(server: EngineServer) -> None:
    async with _stepping(server) as steps:
        hangup = asyncio.create_task(asyncio.sleep(0))
        body = {"input_ids": [20, 31, 42], "rid": "gone", "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}
        call = asyncio.create_task(server.generation.generate(body, hangup))
        await steps.until_computing()
        assert hangup.done()
        steps.let_go()
        answer = await call
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.scheduler.num_running == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.abort("first"),
        lambda s: s.pause(PauseMode.ABORT),
        lambda s: s.flush(),
        lambda s: s.loaded("0.1"),
        lambda s: s.relabel("0.1"),
    ],
    ids=["abort", "pause", "flush", "loaded", "relabel"],
)
async def test_what_changes_the_engine_is_an_error_while_a_step_is_computed(server: EngineServer, change: Any) -> None:
    async with _stepping(server) as steps:
        steps.scheduler.submit(_request("first"))
        await steps.until_computing()
        with pytest.raises(RuntimeError, match="a step is being computed"):
            change(steps.scheduler)
        steps.let_go()
        async with steps.scheduler.between_steps():
            change(steps.scheduler)


async def test_a_swap_that_is_asked_for_twice_during_a_step_is_served_once(
    server: EngineServer, tiny_model: Path
) -> None:
    async with _stepping(server) as steps:
        await steps.call("/stage_weights", model_path=str(tiny_model), weight_version="0.1")
        steps.scheduler.submit(_request("first"))
        await steps.until_computing()
        swap = {"weight_version": "0.1", "in_place": True}
        calls = [asyncio.create_task(steps.call("/swap_weights", **swap)) for _ in range(2)]
        await _few_turns()
        steps.let_go()
        first, second = await asyncio.gather(*calls, return_exceptions=True)
    assert first["success"]
    assert isinstance(second, BadRequestError)


async def test_a_pass_that_fails_ends_the_step_loop_with_its_error(server: EngineServer) -> None:
    def fail(*_arguments: Any) -> Any:
        raise ValueError("no such column")

    server.scheduler.model.forward = fail  # type: ignore[method-assign]
    server.scheduler.submit(_request("first"))
    with pytest.raises(ValueError, match="no such column"):
        await asyncio.wait_for(server.scheduler.run(), _DEADLINE_S)


async def test_short_steps_leave_the_loop_free_only_while_it_is_needed(tiny_model: Path) -> None:
    model = ServedModel(EngineOptions(model=tiny_model, port=1, max_running_requests=2))
    threads: list[str] = []
    forward = model.forward

    def watched(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return forward(*arguments)

    model.forward = watched  # type: ignore[method-assign]
    passes = PassRunner(model, rounds=False, long_s=60.0)
    scheduler = Scheduler(model, passes, 2, 64, "0.0")
    scheduler.submit(_request("first"))
    planned = scheduler.begin_step()
    await passes.run(planned)
    del threads[:]
    await passes.run(planned)
    with scheduler.loop_needed():
        await passes.run(planned)
    await passes.run(planned)
    assert threads == ["MainThread", "engine-step", "MainThread"]


def _prefill(num_tokens: int) -> ForwardPass:
    none = np.zeros(0, np.int64)
    return ForwardPass(slice(0, 1), np.zeros((1, num_tokens), np.int32), none, none, none, none, [], [], None)


async def test_a_pass_much_larger_than_those_before_it_leaves_the_loop_free(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    seconds = [0.0]

    def compute(_model: ServedModel, wanted: ForwardPass, _rounds: bool) -> Computed:
        threads.append(threading.current_thread().name)
        seconds[0] += wanted.ids_BT.size * 5e-4
        return Computed([], None)

    monkeypatch.setattr("agentrl.engine.forward.compute", compute)
    monkeypatch.setattr("agentrl.engine.forward.time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    model = ServedModel(EngineOptions(model=tiny_model, port=1, max_running_requests=2))
    passes = PassRunner(model, rounds=False, long_s=0.1)
    for num_tokens in (50, 50, 4096, 50):
        await passes.run(_prefill(num_tokens))
    assert threads == ["engine-step", "MainThread", "engine-step", "engine-step"]
