from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from engine_server import EngineCalls, Reference, finish_of, logprobs_of, spans_of
from running_request import ENDLESS, ENDLESS_TOKENS

PROMPT = [20, 31, 42, 53, 64, 75, 86]


async def test_an_aborted_running_request_returns_what_it_has(engine: EngineCalls, reference: Reference) -> None:
    running = await engine.start_running(PROMPT, "running-request-0001")
    response = await engine.post("/abort_request", rid="running-request-0001")
    assert (response.status_code, response.content) == (200, b"")
    answer = await running.answer
    output = answer["output_ids"]
    assert finish_of(answer) == "abort"
    assert 0 < len(output) < ENDLESS_TOKENS
    assert spans_of(answer) == [("0.0", 0, len(output))]
    expected = reference.sampled(engine.server.model, PROMPT, output)
    assert logprobs_of(answer) == pytest.approx(expected, abs=1e-3)


async def test_an_aborted_queued_request_returns_nothing_and_the_others_run_on(engine: EngineCalls) -> None:
    running = [engine.start(PROMPT, f"running-request-{n:04d}", **ENDLESS) for n in range(6)]
    await engine.wait_for(running=6)
    queued = engine.start(PROMPT, "queued-request-0001", **ENDLESS)
    await engine.wait_for(waiting=1)
    await engine.ok("/abort_request", rid="queued-request-0001")
    answer = await queued
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    await engine.wait_for(running=6, waiting=0)
    await engine.ok("/abort_request", abort_all=True)
    assert {finish_of(answer) for answer in await asyncio.gather(*running)} == {"abort"}


async def test_a_queued_request_takes_the_place_of_one_that_ends(engine: EngineCalls) -> None:
    running = [engine.start(PROMPT, f"running-request-{n:04d}", **ENDLESS) for n in range(6)]
    await engine.wait_for(running=6)
    queued = engine.start(PROMPT, max_new_tokens=3, ignore_eos=True)
    await engine.wait_for(waiting=1)
    await engine.ok("/abort_request", rid="running-request-0003")
    assert len((await queued)["output_ids"]) == 3
    assert sum(task.done() for task in running) == 1
    await engine.ok("/abort_request", abort_all=True)
    await asyncio.gather(*running)


async def test_aborting_what_is_unknown_or_over_is_no_error(engine: EngineCalls) -> None:
    await engine.generate(PROMPT, "finished-request-0001", max_new_tokens=1)
    for rid in ("nobody-knows-this-one", "finished-request-0001"):
        assert (await engine.post("/abort_request", rid=rid)).status_code == 200
    assert len((await engine.generate(PROMPT, max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2


async def test_abort_all_ends_everything_in_flight(engine: EngineCalls) -> None:
    tasks = [engine.start(PROMPT, f"one-of-many-{n:04d}", **ENDLESS) for n in range(9)]
    await engine.wait_for(running=6, waiting=3)
    await engine.ok("/abort_request", abort_all=True)
    answers = await asyncio.gather(*tasks)
    assert {finish_of(answer) for answer in answers} == {"abort"}
    await engine.wait_for(running=0, waiting=0)


async def test_a_client_that_hangs_up_aborts_its_request(engine: EngineCalls) -> None:
    whole = engine.start(PROMPT, "hung-up-0001", **ENDLESS)
    await engine.wait_for(running=1)
    whole.cancel()
    await engine.wait_for(running=0)
    async with aclosing(engine.stream(PROMPT, "hung-up-0002", **ENDLESS)) as events:
        await anext(events)
        assert (await engine.count())[0] == 1
    await engine.wait_for(running=0)
