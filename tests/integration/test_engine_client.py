from __future__ import annotations

import asyncio
import dataclasses
import json
from contextlib import suppress

import numpy as np
import pytest
from engine_server import EngineCalls, Reference
from running_request import ENDLESS_TOKENS
from safetensors.torch import load_file

from agentrl.inference.checksum import tensor_checksum
from agentrl.inference.identity import request_hash
from agentrl.types.errors import Boundary, EngineError, EpisodeError
from agentrl.types.generation import FinishReason, GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion, VersionSpan
from agentrl.types.weights import FolderWeights, PauseMode

PROMPT = [20, 31, 42, 53, 64, 75, 86]
FIRST = PolicyVersion(0, 0)
LONG_SEED = 1  # draws no end token for a thousand tokens


def _request(rid: str, max_new_tokens: int = 8, prompt: list[int] = PROMPT, **sampling: object) -> GenerationRequest:
    ids = np.asarray(prompt, np.int32)
    return GenerationRequest(rid, "session", ids, max_new_tokens, (), Sampling(**sampling), LONG_SEED)


async def test_a_generation_carries_the_replay_contract(engine: EngineCalls, reference: Reference) -> None:
    client = engine.server.client()
    generation = await client.generate(_request("contract-0001", 60))
    output = generation.token_ids.tolist()
    expected = reference.sampled(engine.server.model, PROMPT, output)
    assert generation.logprobs.tolist() == pytest.approx(expected, abs=1e-3)
    assert generation.versions == generation.kv_versions == (VersionSpan(FIRST, 0, len(output)),)
    assert generation.finish in (FinishReason.STOP, FinishReason.LENGTH)
    assert generation.kept_tokens is None
    await client.close()


async def test_a_tied_head_of_a_mixture_of_experts_is_served_or_the_answers_show_that_it_is_not(
    tied_engine: EngineCalls, reference: Reference
) -> None:
    client = tied_engine.server.client()
    gap = float("inf")
    with suppress(EpisodeError):  # a log-probability that is no number is refused
        generation = await client.generate(_request("tied-0001", 12))
        expected = reference.sampled(tied_engine.server.model, PROMPT, generation.token_ids.tolist())
        gap = float(np.abs(generation.logprobs - expected).max())
    await client.close()
    if tied_engine.server.traits.serves_tied_experts:
        assert gap < 1e-3
    else:
        assert gap > 0.1, "no memory that happened to be there is the model's head"


async def test_a_truncated_generation_carries_the_kept_sets_and_the_logprobs_over_them(
    engine: EngineCalls, reference: Reference
) -> None:
    client = engine.server.client()
    generation = await client.generate(_request("truncated-0001", 6, top_k=7, top_p=0.9, temperature=0.6))
    kept = generation.kept_tokens
    assert kept is not None
    assert len(kept) == len(generation.token_ids)
    output = generation.token_ids.tolist()
    tables = reference.distributions(engine.server.model, PROMPT + output, 0.6)[len(PROMPT) - 1 :]
    for at, token in enumerate(output):
        ids = kept.ids[kept.offsets[at] : kept.offsets[at + 1]]
        assert token in ids
        expected = tables[at][token] - tables[at][ids.astype(np.int64)].logsumexp(-1)
        assert generation.logprobs[at] == pytest.approx(float(expected), abs=1e-3)
    await client.close()


async def test_a_greedy_token_has_the_log_probability_that_the_trainer_gives_it(
    engine: EngineCalls, reference: Reference
) -> None:
    client = engine.server.client()
    generation = await client.generate(_request("greedy-00", max_new_tokens=1, temperature=0.0))
    logprob, token = reference.distributions(engine.server.model, PROMPT)[-1].max(-1)
    assert generation.token_ids.tolist() == [int(token)]
    assert generation.logprobs[0] == pytest.approx(float(logprob), abs=1e-4)
    await client.close()


async def test_an_embedded_engine_echoes_the_hash_of_what_it_was_asked(embedded: EngineCalls) -> None:
    sampling = {"max_new_tokens": 2, "temperature": 1}
    answer = await embedded.generate(PROMPT, **sampling)
    assert answer["meta_info"]["request_hash"] == request_hash(PROMPT, sampling, None)


async def test_scores_of_the_last_token_of_a_vocabulary_equal_hugging_face(
    engine: EngineCalls, reference: Reference
) -> None:
    last = json.loads((engine.server.model / "config.json").read_text())["vocab_size"] - 1
    prompt = [last, *PROMPT, last, 3, last]
    client = engine.server.client()
    assert await client.score(prompt) == pytest.approx(reference.logprobs(engine.server.model, prompt), abs=1e-4)
    await client.close()
    scoring = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
    answer = await engine.ok("/generate", input_ids=prompt, **scoring)
    named = answer["meta_info"]["input_token_logprobs"][-1][1]
    assert named == (0 if engine.server.traits.names_the_last_token_0_when_scoring else last)


async def test_scores_equal_hugging_face(engine: EngineCalls, reference: Reference) -> None:
    client = engine.server.client()
    assert await client.score(PROMPT) == pytest.approx(reference.logprobs(engine.server.model, PROMPT), abs=1e-4)
    await client.close()


async def test_a_refusal_is_an_episode_failure_with_the_engines_reason(embedded: EngineCalls) -> None:
    client = embedded.server.client()
    with pytest.raises(EpisodeError, match="input id 999 lies outside") as caught:
        await client.generate(_request("refused-0001", prompt=[999]))
    assert (caught.value.failure.boundary, caught.value.failure.kind) == (Boundary.ENGINE, "refused")
    with pytest.raises(EngineError, match="/generate: HTTP 400: input id 999"):
        await client.score([999])
    with pytest.raises(EngineError, match="/no/such/folder"):
        await client.swap(FolderWeights("/no/such/folder"), FIRST)
    await client.close()


async def test_a_cancelled_call_is_aborted_inside_the_engine(engine: EngineCalls) -> None:
    client = engine.server.client()  # draws below are so cold that they go round in circles and end by length
    task = asyncio.create_task(client.generate(_request("cancelled-0001", ENDLESS_TOKENS, temperature=0.01)))
    await engine.wait_for(running=1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.wait_for(running=0, waiting=0)
    again = await client.generate(_request("cancelled-0002", 3, temperature=0.01))
    assert len(again.token_ids) == 3
    await client.close()


async def test_a_call_past_its_deadline_is_aborted_inside_the_engine(embedded: EngineCalls) -> None:
    client = embedded.server.client(PauseMode.RETRACT, generate_s=0.4)
    await client.pause()
    with pytest.raises(EpisodeError, match=r"gave no reply within 0.4 s") as caught:
        await client.generate(_request("too-late-0001"))
    assert (caught.value.failure.boundary, caught.value.failure.kind) == (Boundary.TIMEOUT, "engine.generate")
    await embedded.wait_for(running=0, waiting=0)
    await client.resume()
    await client.close()


async def test_an_interrupted_call_says_so_and_keeps_its_partial_output(embedded: EngineCalls) -> None:
    client = embedded.server.client()
    # So cold that it goes round in circles: no end token comes before the pause.
    task = asyncio.create_task(client.generate(_request("interrupted-0001", ENDLESS_TOKENS, temperature=0.01)))
    await embedded.wait_for(running=1)
    assert await client.pause() == 1
    partial = await task
    await client.resume()
    assert partial.finish is FinishReason.ABORT
    whole = await client.generate(_request("interrupted-0002", len(partial.token_ids) + 1, temperature=0.01))
    assert partial.token_ids.tolist() == whole.token_ids[:-1].tolist()
    await client.close()


async def test_a_queued_call_that_is_aborted_has_no_tokens_and_no_spans(embedded: EngineCalls) -> None:
    client = embedded.server.client()
    await client.pause()
    task = asyncio.create_task(client.generate(_request("queued-0001")))
    await embedded.wait_for(waiting=1)
    await client.abort_all()
    generation = await task
    assert (len(generation.token_ids), generation.versions, generation.finish) == (0, (), FinishReason.ABORT)
    await client.close()


async def test_a_receipt_names_what_is_served_now(embedded: EngineCalls) -> None:
    client = embedded.server.client()
    version = PolicyVersion(1, 7)
    await client.pause()
    await client.swap(FolderWeights(str(embedded.server.other_model)), version)
    receipt = await client.receipt()
    tensors = load_file(embedded.server.other_model / "model.safetensors")
    assert receipt.version == version
    assert receipt.checksums == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    await client.relabel("2.0")
    assert (await client.receipt()).version == PolicyVersion(2, 0)
    await client.close()


async def test_a_label_that_is_no_version_makes_no_receipt(embedded: EngineCalls) -> None:
    client = embedded.server.client()
    await embedded.ok("/update_weight_version", new_version="default")
    with pytest.raises(EngineError, match="'default' is not a policy version"):
        await client.receipt()
    await client.close()


async def test_the_token_is_sent_with_every_control_call(exact_engine: EngineCalls) -> None:
    client = exact_engine.server.client()
    await client.pause()
    assert (await exact_engine.info())["paused"] == "abort"
    await client.resume()
    await client.close()
    stranger = type(client)("stranger", exact_engine.server.url, client._config)
    with pytest.raises(EngineError, match="HTTP 401: /pause_generation needs the engine's bearer token"):
        await stranger.pause()
    await stranger.close()


async def test_after_a_swap_in_place_no_new_request_attends_to_kv_of_the_old_weights(
    engine: EngineCalls, reference: Reference
) -> None:
    client = engine.server.client(PauseMode.IN_PLACE)
    prompt = PROMPT * 9
    for version, model in ((FIRST, engine.server.model), (FIRST.next(), engine.server.other_model)):
        if version != FIRST:
            await client.pause()
            await client.swap(FolderWeights(str(model)), version)
            await client.resume()
        for number in range(2):
            request = _request(f"named-cache-{version.step}-{number}", prompt=prompt)
            generation = await client.generate(dataclasses.replace(request, expects=version))
            expected = reference.sampled(model, prompt, generation.token_ids.tolist())
            assert generation.logprobs.tolist() == pytest.approx(expected, abs=1e-3)
            assert {span.version for span in generation.versions} == {version}
    await client.close()


async def test_a_request_held_over_a_swap_in_place_names_the_weights_whose_kv_it_found(engine: EngineCalls) -> None:
    client = engine.server.client(PauseMode.IN_PLACE)
    first = dataclasses.replace(_request("held-over-0001", prompt=PROMPT[::-1] * 9), expects=FIRST)
    await client.generate(first)
    await client.pause()
    held = asyncio.create_task(client.generate(dataclasses.replace(first, rid="held-over-0002")))
    await asyncio.sleep(0.3)  # SGLang holds it back before its queue, where no count shows it
    assert not held.done()
    await client.swap(FolderWeights(str(engine.server.other_model)), FIRST.next())
    await client.resume()
    generation = await held
    assert {span.version for span in generation.versions} == {FIRST.next()}
    assert (generation.cached_tokens > 0) is engine.server.traits.reuses_cache_of_old_weights
    oldest = FIRST.next() if engine.server.traits.reports_kv_versions else FIRST
    assert {span.version for span in generation.kv_versions} == {oldest}
    await client.close()
