from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from engine_server import EngineCalls, Reference, logprobs_of, pickled, spans_of
from flattened import FlattenedTensorMetadata, bucket, flatten_by_values
from safetensors.torch import load_file

from agentrl.weights.payloads import shared_payload

PROMPT = [20, 31, 42, 53, 64, 75, 86]
NORM = "model.norm.weight"


@pytest.fixture
async def session(engine: EngineCalls) -> EngineCalls:
    """A paused engine with a weight update begun."""
    await engine.ok("/pause_generation", mode="abort")
    await engine.ok("/begin_weight_update")
    return engine


@pytest.fixture
async def guarded(embedded: EngineCalls) -> AsyncIterator[EngineCalls]:
    """An embedded engine that must be served unchanged at the end."""
    before = await embedded.ok("/weights_checker", action="checksum")
    await embedded.ok("/begin_weight_update")
    yield embedded
    await embedded.post("/end_weight_update")
    assert await embedded.ok("/weights_checker", action="checksum") == before


def _named(engine: EngineCalls) -> list[tuple[str, torch.Tensor]]:
    return list(load_file(engine.server.other_model / "model.safetensors").items())


async def _check_new_weights(engine: EngineCalls, reference: Reference) -> None:
    await engine.ok("/end_weight_update")
    await engine.ok("/continue_generation")
    answer = await engine.generate(PROMPT, max_new_tokens=10, ignore_eos=True)
    assert spans_of(answer) == [("0.1", 0, 10)]
    expected = reference.sampled(engine.server.other_model, PROMPT, answer["output_ids"])
    assert logprobs_of(answer) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("encode", "layout"),
    [
        (pickled, None),
        (flatten_by_values, "flattened_bucket"),
        (shared_payload, None),
    ],
)
async def test_buckets_in_every_encoding_are_served_together(
    session: EngineCalls, reference: Reference, encode: Any, layout: str | None
) -> None:
    tensors = _named(session)
    for piece, is_last in ((tensors[:4], False), (tensors[4:], True)):
        assert (await session.info())["weight_version"] == "0.0"
        body: dict[str, Any] = {"serialized_named_tensors": [encode(piece)], "flush_cache": is_last}
        version = {"weight_version": "0.1"} if is_last else {}
        await session.ok("/update_weights_from_tensor", load_format=layout, **body, **version)
    await _check_new_weights(session, reference)


def _place(name: str, start: int, end: int, numel: int, shape: tuple[int, ...]) -> FlattenedTensorMetadata:
    return FlattenedTensorMetadata(name, torch.Size(shape), torch.float32, start, end, numel)


BYTES = torch.zeros(512, dtype=torch.uint8)
BAD_BUCKETS = {
    "unknown name": (bucket(BYTES, [_place("unheard.of", 0, 16, 4, (4,))]), "no tensor unheard.of"),
    "wrong shape": (bucket(BYTES, [_place(NORM, 0, 16, 4, (4,))]), NORM),
    "beyond the end": (bucket(BYTES, [_place(NORM, 496, 752, 64, (64,))]), "lie outside"),
    "before the start": (bucket(BYTES, [_place(NORM, -16, 240, 64, (64,))]), "lie outside"),
    "overlap": (bucket(BYTES, [_place(NORM, 0, 256, 64, (64,)), _place("b", 252, 256, 1, (1,))]), "overlap"),
    "one name twice": (bucket(BYTES, [_place(NORM, 0, 16, 4, (4,)), _place(NORM, 16, 32, 4, (4,))]), "twice"),
    "too few bytes": (bucket(BYTES, [_place(NORM, 0, 128, 64, (64,))]), "128 bytes where its shape"),
    "not bytes": (bucket(torch.zeros(64), [_place(NORM, 0, 256, 64, (64,))]), "uint8"),
    "no bucket": (pickled([(NORM, torch.zeros(64))]), "cannot be read"),
    "no places": (bucket(BYTES, [7]), "cannot be read"),
    "no code": (bucket(BYTES, [print]), "builtins.print"),
}


@pytest.mark.parametrize("case", BAD_BUCKETS)
async def test_a_bucket_that_contradicts_itself_or_the_model_changes_nothing(guarded: EngineCalls, case: str) -> None:
    payload, words = BAD_BUCKETS[case]
    body = {"serialized_named_tensors": [payload], "load_format": "flattened_bucket", "weight_version": "0.9"}
    assert words in await guarded.refused("/update_weights_from_tensor", **body)


async def test_a_refused_bucket_keeps_out_those_before_and_after_it(guarded: EngineCalls) -> None:
    tensors = _named(guarded)
    good = {"serialized_named_tensors": [pickled(tensors[:4])], "flush_cache": False}
    await guarded.ok("/update_weights_from_tensor", **good)
    bad = {"serialized_named_tensors": [BAD_BUCKETS["wrong shape"][0]], "load_format": "flattened_bucket"}
    await guarded.refused("/update_weights_from_tensor", **bad)
    assert "earlier bucket" in await guarded.refused("/update_weights_from_tensor", **good, weight_version="0.9")


async def test_a_discarded_update_is_not_served(guarded: EngineCalls) -> None:
    body = {"serialized_named_tensors": [pickled(_named(guarded)[:4])], "flush_cache": False}
    await guarded.ok("/update_weights_from_tensor", **body)
    await guarded.ok("/end_weight_update", discard=True)


async def test_buckets_without_a_version_are_served_from_the_end_of_the_update(
    session: EngineCalls, reference: Reference
) -> None:
    body = {"serialized_named_tensors": [pickled(_named(session))], "flush_cache": True}
    await session.ok("/update_weights_from_tensor", **body)
    await session.ok("/end_weight_update")
    await session.ok("/update_weight_version", new_version="0.1")
    await session.ok("/begin_weight_update")
    await _check_new_weights(session, reference)


async def test_memory_that_is_not_torchs_is_never_mapped(guarded: EngineCalls) -> None:
    data = base64.b64decode(shared_payload([(NORM, torch.zeros(64))]))
    start = data.index(b"/torch_")
    foreign = data[:start] + b"/other_" + data[start + 7 :]
    payload = base64.b64encode(foreign).decode()
    message = await guarded.refused("/update_weights_from_tensor", serialized_named_tensors=[payload])
    assert "no shared memory of torch" in message


async def test_shared_memory_that_is_gone_is_refused(guarded: EngineCalls) -> None:
    tensor = torch.zeros(64)
    payload = shared_payload([(NORM, tensor)])
    storage = tensor.untyped_storage()
    storage._shared_decref()
    del tensor, storage
    message = await guarded.refused("/update_weights_from_tensor", serialized_named_tensors=[payload])
    assert "cannot be read" in message
