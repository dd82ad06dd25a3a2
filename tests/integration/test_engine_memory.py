from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from engine_server import EngineCalls, Reference, logprobs_of, spans_of
from running_request import MANY_TOKENS

pytestmark = pytest.mark.long

PROMPT = [20, 31, 42, 53, 64, 75, 86]


@pytest.fixture
async def spare(embedded: EngineCalls) -> AsyncIterator[EngineCalls]:
    """An embedded engine that gets its memory and its weights back at the end."""
    yield embedded
    await embedded.post("/abort_request", abort_all=True)
    await embedded.ok("/resume_memory_occupation")
    await embedded.load(embedded.server.model, "0.0")


async def test_released_memory_is_refused_to_generation_until_it_is_back(
    spare: EngineCalls, reference: Reference
) -> None:
    await spare.generate(PROMPT, max_new_tokens=5, ignore_eos=True)
    await spare.ok("/pause_generation", mode="abort")
    response = await spare.post("/release_memory_occupation")
    assert (response.status_code, response.json()) == (200, None)
    await spare.ok("/continue_generation")
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    assert "KV cache is released" in await spare.refused("/generate", **body)
    assert (await spare.post("/resume_memory_occupation")).json() is None
    assert "update all weights first" in await spare.refused("/generate", **body)
    await spare.load(spare.server.other_model, "0.1")
    answer = await spare.generate(PROMPT, max_new_tokens=10, ignore_eos=True)
    assert spans_of(answer) == [("0.1", 0, 10)]
    assert answer["meta_info"]["cached_tokens"] == 0
    expected = reference.sampled(spare.server.other_model, PROMPT, answer["output_ids"])
    assert logprobs_of(answer) == pytest.approx(expected, abs=1e-3)


async def test_memory_that_requests_use_is_not_released(spare: EngineCalls) -> None:
    request = await spare.start_running(PROMPT, "holds-memory-0001")
    assert "requests hold memory" in await spare.refused("/release_memory_occupation")
    await spare.ok("/pause_generation", mode="in_place")
    assert "requests hold memory" in await spare.refused("/release_memory_occupation")
    await spare.ok("/continue_generation")
    await request.stop_after(MANY_TOKENS)


async def test_retracted_requests_go_on_once_cache_and_weights_are_back(
    spare: EngineCalls, reference: Reference
) -> None:
    request = await spare.start_running(PROMPT, "retracted-for-memory-0001")
    await spare.ok("/pause_generation", mode="retract")
    await spare.ok("/release_memory_occupation")
    assert "KV cache is released" in await spare.refused("/continue_generation")
    await spare.ok("/resume_memory_occupation")
    assert "update all weights first" in await spare.refused("/continue_generation")
    await spare.load(spare.server.other_model, "0.1")
    await spare.ok("/continue_generation")
    answer = await request.stop_after(MANY_TOKENS)
    (_, _, switch), (version, _, end) = spans_of(answer)
    assert (version, end) == ("0.1", len(answer["output_ids"]))
    expected = reference.sampled(spare.server.other_model, PROMPT, answer["output_ids"])[switch:]
    assert logprobs_of(answer)[switch:] == pytest.approx(expected, abs=1e-3)


async def test_a_request_that_comes_while_memory_is_released_waits_until_it_is_back(
    spare: EngineCalls, reference: Reference
) -> None:
    await spare.ok("/pause_generation", mode="abort")
    await spare.ok("/release_memory_occupation", tags=["kv_cache"])
    task = spare.start(PROMPT, max_new_tokens=10, ignore_eos=True)
    await spare.wait_for(running=0, waiting=1)
    await spare.ok("/resume_memory_occupation", tags=["kv_cache"])
    await spare.ok("/continue_generation")
    answer = await task
    expected = reference.sampled(spare.server.model, PROMPT, answer["output_ids"])
    assert logprobs_of(answer) == pytest.approx(expected, abs=1e-3)


async def test_a_client_has_an_engine_release_its_memory_and_take_it_again(
    engine: EngineCalls, reference: Reference
) -> None:
    client = engine.server.client(control_s=60.0)
    for _ in range(2):
        request = await engine.start_running(PROMPT)
        assert await client.pause() in (0, 1)  # SGLang does not say how many it interrupted
        await client.release_memory()
        cut = await request.answer
        assert cut["meta_info"]["finish_reason"]["type"] == "abort"
        await client.resume_memory()
        await client.resume()
        context = PROMPT + cut["output_ids"]
        answer = await engine.generate(context, max_new_tokens=10, ignore_eos=True)
        expected = reference.sampled(engine.server.model, context, answer["output_ids"])
        assert logprobs_of(answer) == pytest.approx(expected, abs=1e-3)
    await client.close()


@pytest.mark.parametrize("tags", ["kv_cache", ["cuda_graph"], [7]])
async def test_unknown_tags_are_named(spare: EngineCalls, tags: object) -> None:
    assert "tags must be some of" in await spare.refused("/release_memory_occupation", tags=tags)


async def test_an_idle_cache_is_released_and_comes_back_empty(engine: EngineCalls, reference: Reference) -> None:
    await engine.generate(PROMPT, max_new_tokens=4)
    await engine.ok("/pause_generation", mode="abort")
    assert (await engine.post("/release_memory_occupation", tags=["kv_cache"])).status_code == 200
    assert (await engine.post("/resume_memory_occupation", tags=["kv_cache"])).status_code == 200
    await engine.ok("/continue_generation")
    answer = await engine.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
    assert answer["meta_info"]["cached_tokens"] == 0
    expected = reference.sampled(engine.server.model, PROMPT, answer["output_ids"])
    assert logprobs_of(answer) == pytest.approx(expected, abs=1e-3)
