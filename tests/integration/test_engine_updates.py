from __future__ import annotations

import pytest
import torch
from engine_server import EngineCalls, Reference, copy_model, finish_of, logprobs_of, pickled, spans_of
from flattened import flatten
from running_request import MANY_TOKENS
from safetensors.torch import load_file, save_file

PROMPT = [20, 31, 42, 53, 64, 75, 86]


def _tensors(engine: EngineCalls) -> list[tuple[str, torch.Tensor]]:
    return list(load_file(engine.server.other_model / "model.safetensors").items())


async def _serves(engine: EngineCalls, reference: Reference, model: object, version: str) -> None:
    answer = await engine.generate(PROMPT, max_new_tokens=10, ignore_eos=True)
    assert spans_of(answer) == [(version, 0, 10)]
    expected = reference.sampled(model, PROMPT, answer["output_ids"])
    assert logprobs_of(answer) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("mode", "status"), [("abort", 200), ("retract", 200), ("in_place", 400)])
async def test_a_paused_cache_can_be_flushed_unless_requests_are_frozen_in_it(
    engine: EngineCalls, mode: str, status: int
) -> None:
    request = await engine.start_running(PROMPT, f"flushed-under-{mode}")
    await engine.ok("/pause_generation", mode=mode)
    assert (await engine.post("/flush_cache")).status_code == status
    await engine.ok("/continue_generation")
    if mode == "abort":
        assert finish_of(await request.answer) == "abort"
    else:
        await request.stop_after(MANY_TOKENS)


async def test_an_in_place_load_that_flushes_is_refused_before_or_after_it_changed_the_weights(
    engine: EngineCalls, reference: Reference
) -> None:
    request = await engine.start_running(PROMPT, "frozen-under-a-flush")
    await engine.ok("/pause_generation", mode="in_place")
    body = {"model_path": str(engine.server.other_model), "weight_version": "0.1", "abort_all_requests": False}
    assert (await engine.post("/update_weights_from_disk", **body)).status_code == 400
    assert (await engine.info())["weight_version"] == "0.0"
    await engine.ok("/abort_request", abort_all=True)
    await engine.ok("/continue_generation")
    await request.answer
    await engine.flush()
    answer = await engine.generate(PROMPT, max_new_tokens=10, ignore_eos=True)
    served = engine.server.model if engine.server.traits.refuses_before_loading else engine.server.other_model
    assert logprobs_of(answer) == pytest.approx(reference.sampled(served, PROMPT, answer["output_ids"]), abs=1e-3)
    await engine.load(engine.server.model, "0.0")


async def test_a_flattened_bucket_is_served_or_refused(engine: EngineCalls, reference: Reference) -> None:
    await engine.ok("/pause_generation", mode="abort")
    await engine.ok("/begin_weight_update")
    body = {
        "serialized_named_tensors": [flatten(_tensors(engine))],
        "load_format": "flattened_bucket",
        "weight_version": "0.1",
    }
    response = await engine.post("/update_weights_from_tensor", **body)
    await engine.ok("/end_weight_update")
    await engine.ok("/continue_generation")
    if engine.server.traits.reads_flattened_buckets:
        assert response.status_code == 200, response.text
        await _serves(engine, reference, engine.server.other_model, "0.1")
    else:
        assert response.status_code == 400
        await _serves(engine, reference, engine.server.model, "0.0")


async def test_tensors_of_less_precision_are_taken_as_they_are(
    engine: EngineCalls, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> None:
    coarse = {name: tensor.bfloat16() for name, tensor in _tensors(engine)}
    folder = copy_model(engine.server.model, tmp_path_factory.mktemp("coarse") / "model", seed=0)
    save_file({name: tensor.float() for name, tensor in coarse.items()}, folder / "model.safetensors", {"format": "pt"})
    await engine.ok("/pause_generation", mode="abort")
    await engine.ok("/begin_weight_update")
    payload = pickled(list(coarse.items()))
    await engine.ok("/update_weights_from_tensor", serialized_named_tensors=[payload], weight_version="0.1")
    await engine.ok("/end_weight_update")
    await engine.ok("/continue_generation")
    await _serves(engine, reference, folder, "0.1")


async def test_a_name_that_the_model_lacks_is_refused_or_passed_over(engine: EngineCalls, reference: Reference) -> None:
    await engine.ok("/pause_generation", mode="abort")
    await engine.ok("/begin_weight_update")
    payload = pickled([("model.layers.0.unheard_of.weight", torch.zeros(3))])
    response = await engine.post("/update_weights_from_tensor", serialized_named_tensors=[payload])
    await engine.ok("/end_weight_update")
    await engine.ok("/continue_generation")
    assert response.status_code == (400 if engine.server.traits.refuses_unknown_tensors else 200)
    await _serves(engine, reference, engine.server.model, "0.0")


async def test_checksums_change_with_the_weights_and_return_with_them(engine: EngineCalls) -> None:
    first = await engine.checksums()
    await engine.load(engine.server.other_model, "0.1")
    second = await engine.checksums()
    await engine.load(engine.server.model, "0.0")
    assert first
    assert first.keys() == second.keys()
    assert first != second
    assert await engine.checksums() == first


async def test_a_load_of_what_cannot_be_read_leaves_the_engine_as_it_was(
    engine: EngineCalls, reference: Reference
) -> None:
    response = await engine.post("/update_weights_from_disk", model_path="/no/such/folder", weight_version="0.1")
    assert response.status_code == 400
    await _serves(engine, reference, engine.server.model, "0.0")


async def test_requests_retracted_by_two_publications_in_a_row_name_all_three_versions(
    engine: EngineCalls, reference: Reference
) -> None:
    publications = [("0.1", engine.server.other_model), ("0.2", engine.server.model)]
    request = await engine.start_running(PROMPT)
    for version, folder in publications:
        await request.until(request.num_tokens + MANY_TOKENS)
        await engine.ok("/pause_generation", mode="retract")
        await engine.load(folder, version)
        await engine.ok("/continue_generation")
    answer = await request.stop_after(MANY_TOKENS)
    models = {"0.0": engine.server.model, "0.1": engine.server.other_model, "0.2": engine.server.model}
    assert [version for version, _, _ in spans_of(answer)] == ["0.0", "0.1", "0.2"]
    for version, start, end in spans_of(answer):
        expected = reference.sampled(models[version], PROMPT, answer["output_ids"])[start:end]
        assert logprobs_of(answer)[start:end] == pytest.approx(expected, abs=1e-3)
    if engine.server.traits.reports_kv_versions:
        assert spans_of(answer, "kv_versions") == spans_of(answer)
