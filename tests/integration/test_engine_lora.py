from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_server import EngineCalls, Reference, finish_of, generate_body, logprobs_of
from lora_adapters import MadeAdapter, make_adapter
from running_request import ENDLESS_TOKENS, MANY_TOKENS
from safetensors.torch import save_file

from agentrl.types.generation import FinishReason, GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion, VersionSpan

PROMPT = [(11 * n) % 280 + 10 for n in range(90)]  # more than one step's prompt tokens
COLD = 0.03  # so that draws go round in circles; at 0.1 an end token comes in some of them
V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)
_names = itertools.count()


@pytest.fixture(scope="module")
def first(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> MadeAdapter:
    return make_adapter(engine_model, tmp_path_factory.mktemp("first"), seed=1)


@pytest.fixture(scope="module")
def second(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> MadeAdapter:
    """Of another rank, and of fewer modules."""
    folder = tmp_path_factory.mktemp("second")
    return make_adapter(engine_model, folder, seed=2, rank=7, modules=("q_proj", "v_proj", "down_proj"))


@pytest.fixture
def other_shape(engine_model: Path, tmp_path: Path) -> MadeAdapter:
    """An adapter of the model's modules, two inputs too wide."""
    made = make_adapter(engine_model, tmp_path, seed=4, modules=("up_proj",))
    wide = {n: torch.nn.functional.pad(t, (0, 2 * ("lora_A" in n))) for n, t in made.tensors.items()}
    save_file(wide, made.folder / "adapter_model.safetensors")
    return made


@asynccontextmanager
async def _loaded(engine: EngineCalls, adapter: MadeAdapter, name: str | None = None) -> AsyncIterator[str]:
    """An adapter under a name of its own, unloaded in the end."""
    name = name or f"adapter-{next(_names):04d}"
    await engine.ok("/load_lora_adapter", lora_name=name, lora_path=str(adapter.folder))
    try:
        yield name
    finally:
        await engine.post("/abort_request", abort_all=True)
        await engine.post("/unload_lora_adapter", lora_name=name)


async def _listed(engine: EngineCalls) -> list[str]:
    return [model["id"] for model in (await engine.http.get("/v1/models")).json()["data"]]


async def _refusal(engine: EngineCalls, path: str, **body: Any) -> str:
    response = await engine.post(path, **body)
    assert response.status_code == 400, response.text
    return response.json()["error_message"]


def _is_as_merged(reference: Reference, model: Path, prompt: list[int], answer: dict[str, Any]) -> bool:
    expected = reference.sampled(model, prompt, answer["output_ids"])
    return logprobs_of(answer) == pytest.approx(expected, abs=1e-4)


async def test_logprobs_equal_those_of_the_model_with_the_adapter_merged_into_it(
    lora_engine: EngineCalls, reference: Reference, first: MadeAdapter
) -> None:
    async with _loaded(lora_engine, first) as name:
        answer = await lora_engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True, lora_path=name)
    assert _is_as_merged(reference, first.merged, PROMPT, answer)
    assert not _is_as_merged(reference, lora_engine.server.model, PROMPT, answer)


async def test_an_adapter_comes_as_tensors_too(
    lora_engine: EngineCalls, reference: Reference, second: MadeAdapter
) -> None:
    body = {"lora_name": "tensors-0001", "config_dict": second.config, "serialized_named_tensors": [second.payload]}
    loaded = await lora_engine.ok("/load_lora_adapter_from_tensors", **body)
    assert loaded["success"] is True
    assert loaded["loaded_adapters"]["tensors-0001"] == "__tensor__"
    answer = await lora_engine.generate(PROMPT, max_new_tokens=10, ignore_eos=True, lora_path="tensors-0001")
    assert _is_as_merged(reference, second.merged, PROMPT, answer)
    unloaded = await lora_engine.ok("/unload_lora_adapter", lora_name="tensors-0001")
    assert "tensors-0001" not in unloaded["loaded_adapters"]
    refused = generate_body(PROMPT, max_new_tokens=1, lora_path="tensors-0001")
    assert (await lora_engine.post("/generate", **refused)).status_code == 400


async def test_each_row_of_a_mixed_batch_has_its_own_adapter(
    lora_engine: EngineCalls, reference: Reference, first: MadeAdapter, second: MadeAdapter
) -> None:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(_loaded(lora_engine, first))
        two = await stack.enter_async_context(_loaded(lora_engine, second))
        names = [one, None, two, None, one, two]
        models = {one: first.merged, two: second.merged, None: lora_engine.server.model}
        prompts = [PROMPT[:20]] * 3 + [PROMPT[: 10 + 5 * n] for n in range(3)]
        body = {"input_ids": prompts, "lora_path": names, "return_logprob": True}
        answers = await lora_engine.ok("/generate", **body, sampling_params={"max_new_tokens": 12, "ignore_eos": True})
    for name, prompt, answer in zip(names, prompts, answers, strict=True):
        assert _is_as_merged(reference, models[name], prompt, answer)


async def test_kv_of_one_adapter_is_never_reused_under_another(
    lora_engine: EngineCalls, reference: Reference, first: MadeAdapter, second: MadeAdapter
) -> None:
    prompt = [(17 * n) % 280 + 11 for n in range(60)]
    settings = {"max_new_tokens": 5, "ignore_eos": True}
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(_loaded(lora_engine, first))
        two = await stack.enter_async_context(_loaded(lora_engine, second))
        for name, model in ((None, lora_engine.server.model), (one, first.merged), (two, second.merged)):
            answer = await lora_engine.generate(prompt, **settings, lora_path=name)
            assert answer["meta_info"]["cached_tokens"] == 0
            assert _is_as_merged(reference, model, prompt, answer)
        for name, model in ((None, lora_engine.server.model), (one, first.merged), (two, second.merged)):
            answer = await lora_engine.generate(prompt, **settings, lora_path=name)
            assert answer["meta_info"]["cached_tokens"] > 50
            assert _is_as_merged(reference, model, prompt, answer)


async def test_kv_of_an_unloaded_adapter_is_not_reused_by_its_namesake(
    lora_engine: EngineCalls, reference: Reference, first: MadeAdapter, second: MadeAdapter
) -> None:
    for adapter in (first, second):
        async with _loaded(lora_engine, adapter, "namesake-0001"):
            answer = await lora_engine.generate(PROMPT, max_new_tokens=5, ignore_eos=True, lora_path="namesake-0001")
        assert answer["meta_info"]["cached_tokens"] == 0
        assert _is_as_merged(reference, adapter.merged, PROMPT, answer)


async def test_loaded_adapters_are_listed_until_they_are_unloaded(lora_engine: EngineCalls, first: MadeAdapter) -> None:
    body = {"lora_name": "listed-0001", "lora_path": str(first.folder)}
    answer = await lora_engine.ok("/load_lora_adapter", **body)
    assert (answer["success"], answer["error_message"]) == (True, "")
    assert answer["loaded_adapters"]["listed-0001"] == str(first.folder)
    assert "listed-0001" in await _listed(lora_engine)
    await lora_engine.ok("/unload_lora_adapter", lora_name="listed-0001")
    assert "listed-0001" not in await _listed(lora_engine)


async def test_what_cannot_be_loaded_is_refused_and_loads_nothing(
    lora_engine: EngineCalls, first: MadeAdapter, tmp_path: Path
) -> None:
    big = make_adapter(lora_engine.server.model, tmp_path, seed=3, rank=65, modules=("q_proj",))
    async with _loaded(lora_engine, first) as name:
        before = await _listed(lora_engine)
        again = {"lora_name": name, "lora_path": str(first.folder)}
        assert "already loaded" in await _refusal(lora_engine, "/load_lora_adapter", **again)
        body = {"lora_name": "refused-0001", "lora_path": str(big.folder)}
        assert "rank" in await _refusal(lora_engine, "/load_lora_adapter", **body)
        await _refusal(lora_engine, "/load_lora_adapter", lora_name="refused-0002", lora_path=str(tmp_path / "no"))
        await _refusal(lora_engine, "/unload_lora_adapter", lora_name="refused-0003")
        assert await _listed(lora_engine) == before


async def test_matrices_that_do_not_fit_the_model_are_refused_or_taken(
    lora_engine: EngineCalls, other_shape: MadeAdapter
) -> None:
    refuses = lora_engine.server.traits.refuses_adapters_that_do_not_fit
    body = {"lora_name": "misfit-0001", "lora_path": str(other_shape.folder)}
    response = await lora_engine.post("/load_lora_adapter", **body)
    assert response.status_code == (400 if refuses else 200)
    assert ("the module's is (64, 32)" in response.text) is refuses
    assert ("misfit-0001" in await _listed(lora_engine)) is not refuses
    await lora_engine.post("/unload_lora_adapter", lora_name="misfit-0001")


async def test_an_unloaded_adapter_comes_back_from_its_folder_or_is_refused(
    lora_engine: EngineCalls, reference: Reference, first: MadeAdapter
) -> None:
    async with _loaded(lora_engine, first) as name:
        await lora_engine.ok("/unload_lora_adapter", lora_name=name)
        body = generate_body(PROMPT, max_new_tokens=10, ignore_eos=True, lora_path=name)
        response = await lora_engine.post("/generate", **body)
    comes_back = lora_engine.server.traits.reloads_unloaded_adapters
    assert response.status_code == (200 if comes_back else 400)
    assert not comes_back or _is_as_merged(reference, first.merged, PROMPT, response.json())


async def test_unloading_waits_for_running_requests_while_others_flow(
    lora_engine: EngineCalls, reference: Reference, first: MadeAdapter, second: MadeAdapter
) -> None:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(_loaded(lora_engine, first))
        two = await stack.enter_async_context(_loaded(lora_engine, second))
        running = await lora_engine.start_running(PROMPT[:9], "keeps-its-adapter", lora_path=one)
        unloading = asyncio.create_task(lora_engine.ok("/unload_lora_adapter", lora_name=one))
        for name, model in ((None, lora_engine.server.model), (two, second.merged)):
            answer = await lora_engine.generate(PROMPT, max_new_tokens=10, ignore_eos=True, lora_path=name)
            assert _is_as_merged(reference, model, PROMPT, answer)
        assert not running.answer.done()
        assert not unloading.done()
        await lora_engine.ok("/abort_request", rid="keeps-its-adapter")
        answer = await running.answer
        assert one not in (await asyncio.wait_for(unloading, 20))["loaded_adapters"]
    assert finish_of(answer) == "abort"
    assert _is_as_merged(reference, first.merged, PROMPT[:9], answer)


async def test_an_adapter_that_is_leaving_takes_no_new_request(embedded: EngineCalls, first: MadeAdapter) -> None:
    async with _loaded(embedded, first) as name:
        running = await embedded.start_running(PROMPT, "last-of-its-kind", lora_path=name)
        unloading = asyncio.create_task(embedded.ok("/unload_lora_adapter", lora_name=name))
        body = generate_body(PROMPT, max_new_tokens=1, lora_path=name)
        async with asyncio.timeout(20):
            while (response := await embedded.post("/generate", **body)).status_code == 200:
                assert not unloading.done()
        assert "is being unloaded" in response.text
        await embedded.ok("/abort_request", rid="last-of-its-kind")
        await unloading
        assert finish_of(await running.answer) == "abort"
        assert "is not loaded" in await embedded.refused("/generate", **body)


async def test_loading_disturbs_no_running_request(
    lora_engine: EngineCalls, reference: Reference, first: MadeAdapter
) -> None:
    running = await lora_engine.start_running(PROMPT, "undisturbed-0001")
    async with _loaded(lora_engine, first) as name:
        await lora_engine.generate(PROMPT, max_new_tokens=5, ignore_eos=True, lora_path=name)
        answer = await running.stop_after(MANY_TOKENS)
    assert answer["meta_info"]["num_retractions"] == 0
    assert _is_as_merged(reference, lora_engine.server.model, PROMPT, answer)


async def test_a_generation_keeps_its_adapter_and_the_next_uses_the_newest(
    lora_engine: EngineCalls, reference: Reference, first: MadeAdapter, second: MadeAdapter
) -> None:
    client = lora_engine.server.client()
    await client.load_adapter(str(first.folder), V1)
    older = asyncio.create_task(client.generate(_request("client-older-0001", ENDLESS_TOKENS)))
    await lora_engine.wait_for(running=1)
    await client.load_adapter(str(second.folder), V2)
    newer = await client.generate(_request("client-newer-0001", 6))
    assert not older.done()
    assert {"adapter-0.1", "adapter-0.2"} <= set(await _listed(lora_engine))
    await lora_engine.ok("/abort_request", rid="client-older-0001")
    partial = await older
    async with asyncio.timeout(20):
        while "adapter-0.1" in await _listed(lora_engine):
            await asyncio.sleep(0.01)
    assert partial.finish is FinishReason.ABORT
    for generation, version, model in ((partial, V1, first.merged), (newer, V2, second.merged)):
        tokens = generation.token_ids.tolist()
        assert generation.versions == generation.kv_versions == (VersionSpan(version, 0, len(tokens)),)
        expected = reference.sampled(model, PROMPT, tokens, COLD)
        assert generation.logprobs.tolist() == pytest.approx(expected, abs=1e-3)
    assert (await client.receipt()).version == V2
    await client.close()
    await lora_engine.ok("/unload_lora_adapter", lora_name="adapter-0.2")


async def test_loading_an_adapter_again_is_safe_whatever_the_engine_holds_by_now(
    lora_engine: EngineCalls, reference: Reference, first: MadeAdapter, second: MadeAdapter
) -> None:
    client = lora_engine.server.client()
    held = {"lora_name": "adapter-0.1", "lora_path": str(first.folder)}

    async def serves(adapter: MadeAdapter) -> None:
        scores = await client.score(PROMPT)
        assert scores == pytest.approx(reference.logprobs(adapter.merged, PROMPT), abs=1e-4)
        assert (await client.receipt()).version == V1

    await lora_engine.ok("/load_lora_adapter", **held)  # the answer was lost
    await client.load_adapter(str(first.folder), V1)
    await serves(first)
    await lora_engine.ok("/unload_lora_adapter", lora_name="adapter-0.1")  # the engine started again
    await client.load_adapter(str(first.folder), V1)
    await serves(first)
    await client.load_adapter(str(second.folder), V1)  # the name is from another run
    await serves(second)
    await client.close()
    await lora_engine.ok("/unload_lora_adapter", lora_name="adapter-0.1")


def _request(rid: str, max_new_tokens: int) -> GenerationRequest:
    """One that draws no end token."""
    ids = np.asarray(PROMPT, np.int32)
    return GenerationRequest(rid, "session", ids, max_new_tokens, (), Sampling(temperature=COLD), seed=1)
