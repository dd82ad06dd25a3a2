from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_server import EngineCalls, Reference, logprobs_of, pickled
from running_request import MANY_TOKENS
from safetensors.torch import load_file

PROMPT = [20, 31, 42, 53, 64, 75, 86]


@pytest.fixture
async def guarded(embedded: EngineCalls, reference: Reference) -> Any:
    """An engine that must serve the same weights after the test as before."""
    before = await embedded.ok("/weights_checker", action="checksum")
    yield embedded
    assert await embedded.ok("/weights_checker", action="checksum") == before
    answer = await embedded.generate(PROMPT, max_new_tokens=5, ignore_eos=True)
    expected = reference.sampled(embedded.server.model, PROMPT, answer["output_ids"])
    assert logprobs_of(answer) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"input_ids": [5, 309, 6]}, "input id 309 lies outside the vocabulary of 309"),
        ({"input_ids": [5, -1]}, "input id -1"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[5], []]}, "each prompt needs token ids"),
        ({"input_ids": [5, [6]]}, "flat lists of integers"),
        ({"input_ids": [5, 0.5]}, "flat lists of integers"),
        ({"input_ids": [2**63]}, "flat lists of integers"),
        ({"input_ids": "text"}, "input_ids"),
        ({"text": "no ids"}, "input_ids"),
        ({"input_ids": [[5], [6]], "rid": ["only-one"]}, "2 prompts, but 1 rid"),
        ({"input_ids": [[5], [6]], "rid": ["twin", "twin"]}, "duplicate request id in flight: twin"),
        ({"input_ids": [5], "rid": 7}, "a string as rid"),
        ({"input_ids": [5], "sampling_params": "greedy"}, "an object as sampling_params"),
        ({"input_ids": [5], "logprob_start_len": 1.5}, "logprob_start_len"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens 0"),
        ({"input_ids": [5], "return_sampling_mask": True}, "return_sampling_mask"),
        ({"input_ids": [5] * 20_000}, "20000 tokens"),
    ],
)
async def test_a_generation_that_does_not_fit_is_refused_by_name(
    guarded: EngineCalls, body: dict[str, Any], names: str
) -> None:
    assert names in await guarded.refused("/generate", **body)


@pytest.mark.parametrize(
    ("sampling", "names"),
    [
        ({"temprature": 1.0}, "unknown field ['temprature']"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": True}, "top_k must be an integer"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": ["stop"]}, "stop_token_ids"),
        ({"sampling_seed": 2**63}, "sampling_seed"),
        ({"sampling_seed": 1e30}, "sampling_seed"),
        ({"n": 2}, "n > 1"),
    ],
)
async def test_sampling_that_cannot_be_done_is_refused_by_name(
    guarded: EngineCalls, sampling: dict[str, Any], names: str
) -> None:
    assert names in await guarded.refused("/generate", input_ids=PROMPT, sampling_params=sampling)


async def test_a_temperature_too_small_to_divide_by_is_greedy(guarded: EngineCalls) -> None:
    cold, greedy = [await guarded.generate(PROMPT, max_new_tokens=5, temperature=t) for t in (1e-300, 0)]
    assert cold["output_ids"] == greedy["output_ids"]
    assert logprobs_of(cold) == pytest.approx(logprobs_of(greedy), abs=1e-4)


async def test_an_id_in_flight_is_refused_and_its_owner_runs_on(engine: EngineCalls) -> None:
    request = await engine.start_running(PROMPT, "taken-already-0001")
    message = await engine.refused("/generate", input_ids=PROMPT, rid="taken-already-0001")
    assert "taken-already-0001" in message or "dup" in message.lower()
    await request.stop_after(MANY_TOKENS)


async def test_a_batch_names_an_adapter_for_each_prompt(guarded: EngineCalls) -> None:
    wrong = {"input_ids": [[20], [30]], "lora_path": [None], "sampling_params": {}}
    assert "2 prompts, but 1 lora_path" in await guarded.refused("/generate", **wrong)


async def test_a_refused_stream_says_why_in_its_only_event(guarded: EngineCalls) -> None:
    events = [event async for event in guarded.stream([999], max_new_tokens=1)]
    assert len(events) == 1
    assert "999" in events[0]["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/pause_generation", {"mode": "sideways"}, "mode must be one of"),
        ("/abort_request", {}, "rid or abort_all"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "/no/such/folder"}, "/no/such/folder"),
        ("/update_weight_version", {"new_version": 7}, "new_version"),
        ("/weights_checker", {"action": "dance"}, "checksum"),
    ],
)
async def test_a_control_call_that_does_not_fit_is_refused_by_name(
    guarded: EngineCalls, path: str, body: dict[str, Any], names: str
) -> None:
    assert names in await guarded.refused(path, **body)


NORM = "model.norm.weight"
PAYLOADS = {
    "not base64": ("not base64!", "cannot be read"),
    "unknown name": (pickled([("model.nrom.weight", torch.zeros(2, 2))]), "model.nrom.weight"),
    "wrong shape": (pickled([(NORM, torch.zeros(2, 2))]), "(2, 2), the model's is (32,)"),
    "runs code": (pickled([(NORM, eval)]), "builtins.eval"),
}


@pytest.mark.parametrize("case", PAYLOADS)
async def test_tensors_that_cannot_be_served_change_nothing(guarded: EngineCalls, case: str) -> None:
    payload, names = PAYLOADS[case]
    await guarded.ok("/begin_weight_update")
    body = {"serialized_named_tensors": [payload], "weight_version": "9.9"}
    assert names in await guarded.refused("/update_weights_from_tensor", **body)
    assert (await guarded.info())["weight_version"] == "0.0"


async def test_one_bad_tensor_keeps_the_good_ones_of_its_bucket_out(guarded: EngineCalls) -> None:
    tensors = list(load_file(guarded.server.other_model / "model.safetensors").items())
    await guarded.ok("/begin_weight_update")
    payload = pickled([*tensors, ("unheard.of", torch.zeros(1))])
    assert "unheard.of" in await guarded.refused("/update_weights_from_tensor", serialized_named_tensors=[payload])


async def test_control_calls_need_the_token_and_generation_does_not(exact_engine: EngineCalls) -> None:
    for header in ("", "Bearer wrong", "secret-of-the-tests"):
        for path in ("/pause_generation", "/update_weights_from_disk", "/abort_request", "/weights_checker"):
            response = await exact_engine.http.post(path, json={}, headers={"authorization": header})
            assert response.status_code == 401
            assert "token" in response.json()["error"]["message"]
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    response = await exact_engine.http.post("/generate", json=body, headers={"authorization": ""})
    assert response.status_code == 200
    assert (await exact_engine.info())["paused"] is None
