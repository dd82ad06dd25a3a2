from __future__ import annotations

import asyncio

import pytest
from engine_server import EngineCalls, Reference, finish_of, logprobs_of, pickled, spans_of
from running_request import MANY_TOKENS
from safetensors.torch import load_file

from agentrl.inference.checksum import tensor_checksum

PROMPT = [20, 31, 42, 53, 64, 75, 86]


@pytest.fixture
async def warm(engine: EngineCalls) -> EngineCalls:
    """An engine with the prompt's KV in its cache, made under the first weights."""
    await engine.generate(PROMPT, max_new_tokens=5, ignore_eos=True)
    return engine


async def _check_new_weights(engine: EngineCalls, reference: Reference, version: str) -> None:
    answer = await engine.generate(PROMPT, max_new_tokens=10, ignore_eos=True)
    assert spans_of(answer) == [(version, 0, 10)]
    expected = reference.sampled(engine.server.other_model, PROMPT, answer["output_ids"])
    assert logprobs_of(answer) == pytest.approx(expected, abs=1e-3)


async def test_weights_from_disk_are_served_at_once_without_stale_cache(
    warm: EngineCalls, reference: Reference
) -> None:
    answer = await warm.load(warm.server.other_model, "0.1")
    assert answer["success"] is True
    assert (await warm.info())["weight_version"] == "0.1"
    await _check_new_weights(warm, reference, "0.1")


async def test_a_load_that_keeps_the_cache_does_not_reuse_it_or_does_until_it_is_flushed(
    warm: EngineCalls, reference: Reference
) -> None:
    await warm.load(warm.server.other_model, "0.1", flush_cache=False)
    answer = await warm.generate(PROMPT, max_new_tokens=10, ignore_eos=True)
    expected = reference.sampled(warm.server.other_model, PROMPT, answer["output_ids"])
    reuses = warm.server.traits.reuses_cache_of_old_weights
    assert (answer["meta_info"]["cached_tokens"] > 0) is reuses
    assert (logprobs_of(answer) != pytest.approx(expected, abs=1e-3)) is reuses
    await warm.flush()
    await _check_new_weights(warm, reference, "0.1")


async def test_tensor_updates_need_an_open_update_and_only_one(engine: EngineCalls) -> None:
    bucket = pickled(list(load_file(engine.server.other_model / "model.safetensors").items())[:1])
    message = await engine.refused("/update_weights_from_tensor", serialized_named_tensors=[bucket])
    assert "begin_weight_update" in message
    await engine.ok("/begin_weight_update")
    assert (await engine.post("/begin_weight_update")).status_code == 400
    await engine.ok("/end_weight_update")
    assert (await engine.post("/end_weight_update")).status_code == 400


async def test_requests_during_an_update_run_on_the_old_weights_or_on_half_of_the_new_ones(
    engine: EngineCalls, reference: Reference
) -> None:
    tensors = list(load_file(engine.server.other_model / "model.safetensors").items())
    await engine.ok("/begin_weight_update")
    payload = pickled(tensors[: len(tensors) // 2])
    await engine.ok("/update_weights_from_tensor", serialized_named_tensors=[payload])
    answer = await engine.generate(PROMPT, max_new_tokens=10, ignore_eos=True)
    await engine.ok("/end_weight_update")
    await engine.load(engine.server.model, "0.0")
    assert spans_of(answer) == [("0.0", 0, 10)]
    expected = reference.sampled(engine.server.model, PROMPT, answer["output_ids"])
    is_of_the_old = logprobs_of(answer) == pytest.approx(expected, abs=1e-3)
    assert is_of_the_old is not engine.server.traits.serves_half_updates


async def test_a_request_frozen_in_place_goes_on_with_its_old_cache(engine: EngineCalls, reference: Reference) -> None:
    request = await engine.start_running(PROMPT)
    await engine.ok("/pause_generation", mode="in_place")
    await engine.load(engine.server.other_model, "0.1", flush_cache=False)
    await engine.ok("/continue_generation")
    answer = await request.stop_after(MANY_TOKENS)
    switch, end = spans_of(answer)[0][2], len(answer["output_ids"])
    assert spans_of(answer) == [("0.0", 0, switch), ("0.1", switch, end)]
    after = reference.sampled(engine.server.other_model, PROMPT, answer["output_ids"])[switch:]
    assert logprobs_of(answer)[switch:] != pytest.approx(after, abs=1e-3)
    if engine.server.traits.reports_kv_versions:
        assert spans_of(answer, "kv_versions") == [("0.0", 0, end)]


async def test_an_aborted_request_goes_on_from_its_tokens_under_the_new_weights(
    engine: EngineCalls, reference: Reference
) -> None:
    request = await engine.start_running(PROMPT)
    await engine.ok("/pause_generation", mode="abort")
    partial = await request.answer
    assert finish_of(partial) == "abort"
    await engine.load(engine.server.other_model, "0.1")
    await engine.ok("/continue_generation")
    prompt = PROMPT + partial["output_ids"]
    rest = await engine.generate(prompt, max_new_tokens=20, ignore_eos=True)
    assert spans_of(partial) == [("0.0", 0, len(partial["output_ids"]))]
    assert spans_of(rest) == [("0.1", 0, 20)]
    expected = reference.sampled(engine.server.other_model, prompt, rest["output_ids"])
    assert logprobs_of(rest) == pytest.approx(expected, abs=1e-3)


async def test_an_update_of_a_running_engine_waits_for_what_runs(engine: EngineCalls) -> None:
    request = await engine.start_running(PROMPT, max_new_tokens=1500)
    update = asyncio.create_task(engine.load(engine.server.other_model, "0.1"))
    await asyncio.sleep(0.3)
    late = engine.start(PROMPT, max_new_tokens=3, ignore_eos=True)
    answer = await request.answer
    assert finish_of(answer) == "length"
    assert spans_of(answer) == [("0.0", 0, 1500)]
    await update
    assert spans_of(await late) == [("0.1", 0, 3)]


async def test_renaming_the_version_changes_the_label_and_nothing_else(engine: EngineCalls) -> None:
    before = await engine.checksums()
    request = await engine.start_running(PROMPT)
    answer = await engine.ok("/update_weight_version", new_version="3.7", abort_all_requests=False)
    assert answer["new_version"] == "3.7"
    assert [span[0] for span in spans_of(await request.stop_after(MANY_TOKENS))] == ["0.0", "3.7"]
    assert (await engine.info())["weight_version"] == "3.7"
    assert await engine.checksums() == before


async def test_renaming_the_version_aborts_everything_unless_told_otherwise(engine: EngineCalls) -> None:
    request = await engine.start_running(PROMPT)
    await engine.ok("/update_weight_version", new_version="0.5")
    assert finish_of(await request.answer) == "abort"


async def test_checksums_are_those_of_the_tensors_on_disk(embedded: EngineCalls, exact_engine: EngineCalls) -> None:
    for engine in (embedded, exact_engine):
        served = (await engine.ok("/weights_checker", action="checksum"))["checksums"]
        tensors = load_file(engine.server.model / "model.safetensors")
        assert served == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    await embedded.load(embedded.server.other_model, "0.1")
    changed = (await embedded.ok("/weights_checker", action="checksum"))["checksums"]
    assert changed.keys() == served.keys()
    assert all(changed[name] != served[name] for name in served)
