"""What has surprised clients of the protocol, pinned as it is on the server that the tests run against."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from engine_server import EngineCalls, Reference, finish_of, logprobs_of
from running_request import ENDLESS, ENDLESS_TOKENS

PROMPT = [20, 31, 42, 53, 64, 75, 86]
_EXPECTED_S = 20.0  # for what comes at once, but on a busy machine


async def _start_both(engine: EngineCalls, first: str, second: str) -> list[asyncio.Task[dict[str, Any]]]:
    """Two requests that run side by side; not streamed, which would have the server far ahead of what it has sent."""
    tasks = [engine.start(PROMPT, rid, **ENDLESS) for rid in (first, second)]
    await engine.wait_for(running=2)
    return tasks


async def test_an_abort_may_match_every_id_that_begins_alike(engine: EngineCalls) -> None:
    short, long = await _start_both(engine, "a-1", "a-10")
    await engine.ok("/abort_request", rid="a-1")
    assert finish_of(await short) == "abort"
    done, _ = await asyncio.wait([long], timeout=_EXPECTED_S if engine.server.traits.aborts_by_prefix else 0.5)
    assert bool(done) is engine.server.traits.aborts_by_prefix


async def test_ids_of_one_width_are_aborted_one_by_one(engine: EngineCalls) -> None:
    one, other = await _start_both(engine, f"{1:032x}", f"{16:032x}")
    await engine.ok("/abort_request", rid=f"{1:032x}")
    assert finish_of(await one) == "abort"
    done, _ = await asyncio.wait([other], timeout=0.5)
    assert not done


async def test_an_abort_that_comes_before_its_request_is_forgotten(engine: EngineCalls) -> None:
    await engine.ok("/abort_request", rid="not-here-yet-0001")
    answer = await engine.generate(PROMPT, "not-here-yet-0001", max_new_tokens=20, ignore_eos=True)
    assert finish_of(answer) == "length"


async def test_a_frozen_request_is_aborted_at_once_or_when_the_pause_ends(engine: EngineCalls) -> None:
    frozen = await engine.start_running(PROMPT, "frozen-request-0001")
    await engine.ok("/pause_generation", mode="in_place")
    await engine.ok("/abort_request", rid="frozen-request-0001")
    at_once = engine.server.traits.aborts_frozen_at_once
    done, _ = await asyncio.wait([frozen.answer], timeout=_EXPECTED_S if at_once else 0.5)
    assert bool(done) is at_once
    await engine.ok("/continue_generation")
    answer = await frozen.answer
    assert finish_of(answer) == "abort"
    assert 0 < len(answer["output_ids"]) < ENDLESS_TOKENS


async def test_a_paused_engine_says_which_weights_it_serves(engine: EngineCalls) -> None:
    await engine.ok("/pause_generation", mode="abort")
    assert (await engine.info())["weight_version"] == "0.0"
    try:
        patience_s = _EXPECTED_S if engine.server.traits.answers_health_while_paused else 1.0
        health = (await engine.http.get("/health", timeout=patience_s)).status_code
    except httpx.ReadTimeout:
        health = None
    assert health == (200 if engine.server.traits.answers_health_while_paused else None)


async def test_a_request_that_a_pause_holds_back_is_aborted_or_runs_when_it_ends(engine: EngineCalls) -> None:
    await engine.ok("/pause_generation", mode="abort")
    held = engine.start(PROMPT, "held-back-0001", max_new_tokens=5, ignore_eos=True)
    await asyncio.sleep(0.2)
    await engine.ok("/abort_request", abort_all=True)
    aborts = engine.server.traits.aborts_held_back
    done, _ = await asyncio.wait([held], timeout=_EXPECTED_S if aborts else 0.5)
    assert bool(done) is aborts
    await engine.ok("/continue_generation")
    assert finish_of(await held) == ("abort" if aborts else "length")


async def test_an_id_used_again_soon_after_a_stream_may_be_aborted(engine: EngineCalls) -> None:
    streamed = await engine.start_running(PROMPT, "streamed-before-0001", max_new_tokens=3)
    await streamed.answer
    again = engine.start(PROMPT, "streamed-before-0001", **ENDLESS)
    is_late = engine.server.traits.aborts_streamed_ids_late
    done, _ = await asyncio.wait([again], timeout=_EXPECTED_S if is_late else 4.0)
    if is_late:
        assert done
        assert finish_of(again.result()) == "abort"
    else:
        assert not done
        await engine.ok("/abort_request", rid="streamed-before-0001")
        assert (await again)["output_ids"]


async def test_ignoring_the_end_token_may_ignore_stop_tokens_too(engine: EngineCalls) -> None:
    whole = (await engine.generate(PROMPT, max_new_tokens=20, temperature=0, ignore_eos=True))["output_ids"]
    answer = await engine.generate(PROMPT, max_new_tokens=20, temperature=0, ignore_eos=True, stop_token_ids=[whole[0]])
    assert finish_of(answer) == ("length" if engine.server.traits.ignores_stop_tokens_with_eos else "stop")


async def test_a_pause_counts_what_it_interrupts_or_says_nothing(engine: EngineCalls) -> None:
    requests = [await engine.start_running(PROMPT) for _ in range(2)]
    answer = await engine.ok("/pause_generation", mode="abort")
    assert answer.get("num_paused_requests") == (2 if engine.server.traits.counts_interrupted else None)
    await asyncio.gather(*(request.answer for request in requests))


@pytest.mark.parametrize("path", ["/pause_generation", "/continue_generation"])
async def test_a_control_call_without_a_body_is_refused(engine: EngineCalls, path: str) -> None:
    assert (await engine.http.post(path)).status_code == 400


async def test_prompts_are_scored_only_if_a_start_is_named(engine: EngineCalls) -> None:
    answer = await engine.generate(PROMPT, max_new_tokens=1)
    assert answer["meta_info"]["input_token_logprobs"] == []


async def test_an_unknown_key_is_ignored_at_the_top_and_refused_in_sampling(engine: EngineCalls) -> None:
    body = {"input_ids": PROMPT, "nonsense": 1, "sampling_params": {"max_new_tokens": 2}}
    assert (await engine.post("/generate", **body)).status_code == 200
    body["sampling_params"] = {"max_new_tokens": 2, "nonsense": 1}
    assert "nonsense" in await engine.refused("/generate", **body)


async def test_several_samples_of_one_prompt_are_a_list_or_refused(engine: EngineCalls) -> None:
    response = await engine.post("/generate", input_ids=PROMPT, sampling_params={"n": 2, "max_new_tokens": 2})
    if engine.server.traits.draws_several_samples:
        assert len(response.json()) == 2
    else:
        assert response.status_code == 400


async def test_a_seed_repeats_its_draw_or_says_nothing(engine: EngineCalls) -> None:
    sampling = {"max_new_tokens": 40, "ignore_eos": True, "sampling_seed": 5}
    answers = [await engine.generate(PROMPT, **sampling) for _ in range(2)]
    are_equal = answers[0]["output_ids"] == answers[1]["output_ids"]
    assert are_equal is engine.server.traits.draws_by_seed


async def test_a_kept_set_needs_a_finite_top_k(engine: EngineCalls) -> None:
    body = {"input_ids": PROMPT, "return_logprob": True, "return_sampling_mask": True}
    for sampling in ({"top_p": 0.9}, {"top_k": 1_000_000}, {}):
        assert (await engine.post("/generate", **body, sampling_params=sampling)).status_code == 400


async def test_support_logprobs_are_of_the_whole_kept_set(engine: EngineCalls, reference: Reference) -> None:
    answer = await engine.generate(
        PROMPT, max_new_tokens=5, top_k=6, return_sampling_mask=True, sampling_logprobs_mode="support", ignore_eos=True
    )
    meta, output = answer["meta_info"], answer["output_ids"]
    rows = meta["output_token_sampling_logprobs"]
    if not engine.server.traits.gives_support_logprobs:
        assert all(isinstance(row, float) for row in rows)
        return
    tables = reference.distributions(engine.server.model, PROMPT + output)[len(PROMPT) - 1 :]
    for at, (row, kept) in enumerate(zip(rows, meta["output_token_sampling_mask"], strict=True)):
        logits = tables[at][kept]
        assert row == pytest.approx((logits - logits.logsumexp(-1)).tolist(), abs=1e-3)
    assert len(logprobs_of(answer)) == 5


async def test_weights_are_staged_or_the_route_is_unknown(engine: EngineCalls) -> None:
    body = {"model_path": str(engine.server.other_model), "weight_version": "0.1"}
    status = (await engine.post("/stage_weights", **body)).status_code
    assert status == (200 if engine.server.traits.stages_weights else 404)
    await engine.load(engine.server.other_model, "0.1")


async def test_an_id_is_free_again_when_its_request_is_over(engine: EngineCalls) -> None:
    for _ in range(2):
        answer = await engine.generate(PROMPT, "used-again-0001", max_new_tokens=2, ignore_eos=True)
        assert answer["meta_info"]["id"] == "used-again-0001"
