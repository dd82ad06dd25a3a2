from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engine_server import EngineCalls, finish_of, logprobs_of

PROMPT = [20, 31, 42, 53, 64, 75, 86]
REST_TOKENS = 50
"""Tokens that take far longer than a client on a busy machine needs to see the first and abort."""


async def _interrupt(engine: EngineCalls, after: int, **sampling: Any) -> dict[str, Any]:
    """The partial output of a request that is aborted once `after` tokens were seen."""
    request = await engine.start_running(PROMPT, "interrupted-request", **sampling)
    partial = await request.stop_after(after - request.num_tokens)
    assert finish_of(partial) == "abort"
    return partial


async def test_one_seed_draws_the_same_tokens_and_another_draws_others(embedded: EngineCalls) -> None:
    first, again, other = [
        await embedded.generate(PROMPT, max_new_tokens=30, ignore_eos=True, sampling_seed=seed) for seed in (5, 5, 6)
    ]
    assert first["output_ids"] == again["output_ids"]
    assert first["output_ids"] != other["output_ids"]


async def test_without_a_seed_each_request_draws_its_own(engine: EngineCalls) -> None:
    answers = [await engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True) for _ in range(2)]
    assert answers[0]["output_ids"] != answers[1]["output_ids"]


async def test_continuing_from_prompt_and_partial_output_draws_the_tokens_of_the_whole(embedded: EngineCalls) -> None:
    sampling = {"temperature": 1.0, "sampling_seed": 77, "ignore_eos": True}
    partial = await _interrupt(embedded, 10, **sampling)
    done = partial["output_ids"]
    whole = await embedded.generate(PROMPT, max_new_tokens=len(done) + REST_TOKENS, **sampling)
    rest = await embedded.generate(PROMPT + done, max_new_tokens=REST_TOKENS, **sampling)
    assert done + rest["output_ids"] == whole["output_ids"]
    assert logprobs_of(partial) + logprobs_of(rest) == pytest.approx(logprobs_of(whole), abs=1e-4)


async def test_deterministic_results_do_not_depend_on_what_else_runs(exact_engine: EngineCalls) -> None:
    sampling = {"max_new_tokens": 40, "temperature": 0.9, "sampling_seed": 2**63 - 1, "ignore_eos": True}
    alone = await exact_engine.generate(PROMPT, **sampling)
    await exact_engine.flush()
    others = [exact_engine.start([10 + n] * (1 + 9 * n), max_new_tokens=10 + 7 * n, ignore_eos=True) for n in range(9)]
    crowded = await exact_engine.generate(PROMPT, **sampling)
    await asyncio.gather(*others)
    cached = await exact_engine.generate(PROMPT, **sampling)
    assert cached["meta_info"]["cached_tokens"] > 0
    for answer in (crowded, cached):
        assert answer["output_ids"] == alone["output_ids"]
        assert logprobs_of(answer) == logprobs_of(alone)


async def test_deterministic_truncation_does_not_depend_on_batching_either(exact_engine: EngineCalls) -> None:
    sampling = {
        "max_new_tokens": 20, "top_k": 12, "top_p": 0.2, "sampling_seed": 4, "ignore_eos": True,
        "return_sampling_mask": True,
    }  # fmt: skip
    alone = await exact_engine.generate(PROMPT, **sampling)
    crowd = [exact_engine.start(prompt, **sampling) for prompt in (PROMPT, [99], PROMPT[:3], PROMPT)]
    answers = await asyncio.gather(*crowd)
    for answer in (answers[0], answers[3]):
        for key in ("output_token_sampling_mask", "output_token_sampling_logprobs"):
            assert answer["meta_info"][key] == alone["meta_info"][key]


async def test_a_deterministic_continuation_is_bit_identical(exact_engine: EngineCalls) -> None:
    sampling = {"temperature": 1.0, "sampling_seed": 78, "ignore_eos": True}
    partial = await _interrupt(exact_engine, 8, **sampling)
    done = partial["output_ids"]
    await exact_engine.flush()
    whole = await exact_engine.generate(PROMPT, max_new_tokens=len(done) + REST_TOKENS, **sampling)
    await exact_engine.flush()
    rest = await exact_engine.generate(PROMPT + done, max_new_tokens=REST_TOKENS, **sampling)
    assert done + rest["output_ids"] == whole["output_ids"]
    assert logprobs_of(partial) + logprobs_of(rest) == logprobs_of(whole)
