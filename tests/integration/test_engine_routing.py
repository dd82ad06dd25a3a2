from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_server import EngineCalls, Reference, finish_of, generate_body

from agentrl.testing.tiny_moe import NUM_EXPERTS, NUM_LAYERS, TOP_K

PROMPT = [(11 * n) % 280 + 10 for n in range(90)]  # more than one step's prompt tokens
WANTED = {"return_routed_experts": True, "ignore_eos": True}
Router = Callable[[list[int]], np.ndarray]


@pytest.fixture
def router(moe_engine: EngineCalls, reference: Reference) -> Router:
    """Hugging Face's choice for every position of a context, [T, layers, top_k], by descending probability."""
    return lambda ids: reference.experts(moe_engine.server.model, ids)


def _experts(answer: dict[str, Any]) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), "<i4")
    return flat.reshape(-1, NUM_LAYERS, TOP_K)


async def test_every_forwarded_position_reports_hugging_faces_experts(moe_engine: EngineCalls, router: Router) -> None:
    answer = await moe_engine.generate(PROMPT, max_new_tokens=20, **WANTED)
    expected = router(PROMPT + answer["output_ids"])
    assert len(np.unique(expected)) == NUM_EXPERTS, "the router is too uniform to prove anything"
    assert np.array_equal(_experts(answer), expected[:-1])


async def test_positions_from_the_prefix_cache_are_reported_too(moe_engine: EngineCalls, router: Router) -> None:
    prompt = [(13 * n) % 280 + 10 for n in range(80)]
    first = await moe_engine.generate(prompt, max_new_tokens=10, ignore_eos=True)
    longer = [*prompt, *first["output_ids"], 5, 6, 7]
    answer = await moe_engine.generate(longer, max_new_tokens=5, **WANTED)
    assert answer["meta_info"]["cached_tokens"] >= len(prompt)
    assert np.array_equal(_experts(answer), router(longer + answer["output_ids"])[:-1])


async def test_members_of_a_batch_that_share_a_prompt_report_their_own_experts(
    moe_engine: EngineCalls, router: Router
) -> None:
    prompts = [[*PROMPT[:40], 20 + n] for n in range(5)]
    sampling = {"max_new_tokens": 12, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_routed_experts": True}
    await moe_engine.generate(PROMPT[:40], max_new_tokens=1)
    for prompt, answer in zip(prompts, await moe_engine.ok("/generate", **body), strict=True):
        assert np.array_equal(_experts(answer), router(prompt + answer["output_ids"])[:-1])


async def test_the_report_begins_where_it_is_asked_to(moe_engine: EngineCalls, router: Router) -> None:
    for start in (0, 33, len(PROMPT)):
        answer = await moe_engine.generate(PROMPT, max_new_tokens=4, routed_experts_start_len=start, **WANTED)
        assert np.array_equal(_experts(answer), router(PROMPT + answer["output_ids"])[start:-1])


async def test_a_start_behind_the_prompt_is_refused(moe_engine: EngineCalls) -> None:
    body = generate_body(PROMPT, max_new_tokens=4, routed_experts_start_len=len(PROMPT) + 1, **WANTED)
    await moe_engine.refused("/generate", **body)


async def test_an_aborted_request_reports_what_it_has(moe_engine: EngineCalls, router: Router) -> None:
    prompt = [99, *PROMPT[:20]]
    request = await moe_engine.start_running(prompt, "routed-abort-0001", **WANTED)
    await moe_engine.ok("/abort_request", rid="routed-abort-0001")
    answer = await request.answer
    assert finish_of(answer) == "abort"
    assert answer["output_ids"]
    assert np.array_equal(_experts(answer), router(prompt + answer["output_ids"])[:-1])


async def test_nothing_is_reported_unasked(moe_engine: EngineCalls) -> None:
    answer = await moe_engine.generate(PROMPT, max_new_tokens=3)
    assert "routed_experts" not in answer["meta_info"]


async def test_a_dense_model_reports_nothing(engine: EngineCalls) -> None:
    answer = await engine.generate(PROMPT, max_new_tokens=3, **WANTED)
    assert "routed_experts" not in answer["meta_info"]
