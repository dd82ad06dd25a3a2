from __future__ import annotations

import asyncio

import pytest
from engine_server import EngineCalls, finish_of, logprobs_of
from running_request import ENDLESS, ENDLESS_TOKENS, MANY_TOKENS

from agentrl.types.errors import EngineError

PROMPT = [20, 31, 42, 53, 64, 75, 86]


async def test_a_pause_by_abort_returns_partial_outputs_at_once(engine: EngineCalls) -> None:
    requests = [await engine.start_running(PROMPT, f"paused-away-{n:04d}") for n in range(2)]
    await engine.ok("/pause_generation", mode="abort")
    answers = await asyncio.gather(*(request.answer for request in requests))
    assert {finish_of(answer) for answer in answers} == {"abort"}
    assert all(0 < len(answer["output_ids"]) < ENDLESS_TOKENS for answer in answers)


async def test_abort_is_the_default_and_counts_what_it_interrupted(embedded: EngineCalls) -> None:
    tasks = [embedded.start(PROMPT, f"counted-{n:04d}", **ENDLESS) for n in range(8)]
    await embedded.wait_for(running=6, waiting=2)
    assert (await embedded.ok("/pause_generation"))["num_paused_requests"] == 8
    assert (await embedded.ok("/pause_generation"))["num_paused_requests"] == 0
    assert {finish_of(answer) for answer in await asyncio.gather(*tasks)} == {"abort"}


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_paused_request_goes_on_as_if_nothing_had_happened(engine: EngineCalls, mode: str) -> None:
    request = await engine.start_running(PROMPT, f"goes-on-after-{mode}", temperature=0)
    await engine.ok("/pause_generation", mode=mode)
    await request.until_still()
    await engine.ok("/continue_generation")
    answer = await request.stop_after(MANY_TOKENS)
    most = len(answer["output_ids"])
    undisturbed = await engine.generate(PROMPT, max_new_tokens=most, temperature=0, ignore_eos=True)
    assert answer["output_ids"] == undisturbed["output_ids"]
    assert logprobs_of(answer) == pytest.approx(logprobs_of(undisturbed), abs=1e-4)
    assert answer["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_sampled_requests_of_a_full_engine_survive_a_pause_with_their_seeds(
    embedded: EngineCalls, mode: str
) -> None:
    def start(number: int) -> asyncio.Task:
        sampling = {"max_new_tokens": 400, "sampling_seed": number, "ignore_eos": True, "logprob_start_len": 0}
        return embedded.start([10 + number] * (70 + number), **sampling)

    before = await asyncio.gather(*(start(n) for n in range(9)))
    tasks = [start(n) for n in range(9)]
    await embedded.wait_for(running=6)
    num_paused = 0
    for _ in range(3):
        num_paused += (await embedded.ok("/pause_generation", mode=mode))["num_paused_requests"]
        await embedded.ok("/continue_generation")
        await asyncio.sleep(0.03)
    assert num_paused
    for old, new in zip(before, await asyncio.gather(*tasks), strict=True):
        assert new["output_ids"] == old["output_ids"]
        prompts = [[entry[0] for entry in a["meta_info"]["input_token_logprobs"][1:]] for a in (old, new)]
        assert prompts[1] == pytest.approx(prompts[0], abs=1e-4)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_requests_that_come_during_a_pause_wait_for_its_end(engine: EngineCalls, mode: str) -> None:
    await engine.ok("/pause_generation", mode=mode)
    task = engine.start(PROMPT, max_new_tokens=4, ignore_eos=True)
    await asyncio.sleep(0.2)
    assert not task.done()
    await engine.ok("/continue_generation")
    assert len((await task)["output_ids"]) == 4


async def test_pausing_and_continuing_twice_is_no_error(engine: EngineCalls) -> None:
    for path in ("/pause_generation", "/pause_generation", "/continue_generation", "/continue_generation"):
        assert (await engine.ok(path))["status"] == "ok"
    assert len((await engine.generate(PROMPT, max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2


async def test_an_engine_describes_itself(engine: EngineCalls) -> None:
    info = await engine.info()
    assert info["weight_version"] == "0.0"
    assert info["is_generation"] is True
    assert (await engine.http.get("/health")).status_code == 200
    models = (await engine.http.get("/v1/models")).json()
    assert len(models["data"]) == 1


async def test_a_paused_engine_says_that_it_is_not_ready(engine: EngineCalls) -> None:
    await engine.http.get("/health")
    assert (await engine.http.get("/ready")).status_code == 200
    await engine.ok("/pause_generation")
    assert (await engine.http.get("/ready")).status_code == 503
    await engine.ok("/continue_generation")
    assert (await engine.http.get("/ready")).status_code == 200


async def test_a_probe_tells_that_an_engine_was_left_paused(embedded: EngineCalls) -> None:
    client = embedded.server.client()
    await embedded.ok("/pause_generation")
    with pytest.raises(EngineError, match="engine engine is paused"):
        await client.probe()
    await client.resume()
    await client.probe()
    await client.close()
