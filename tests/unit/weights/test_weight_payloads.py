from __future__ import annotations

import base64
import pickle
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.unpickler import load_bucket, load_named_tensors
from agentrl.weights.buckets import plan_buckets
from agentrl.weights.flattened import FlattenedTensorMetadata, flatten, unflatten
from agentrl.weights.payloads import bucket_payload, plain_payload, shared_payload

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.uint8)


@pytest.fixture
def sglang_class(monkeypatch: pytest.MonkeyPatch) -> type:
    """A class where SGLang has its own, as a reader on its side finds it."""

    @dataclass
    class FlattenedTensorMetadata:
        name: str
        shape: torch.Size
        dtype: torch.dtype
        start_idx: int
        end_idx: int
        numel: int

    module: Any = types.ModuleType("sglang.srt.weight_sync.tensor_bucket")
    FlattenedTensorMetadata.__module__ = module.__name__
    FlattenedTensorMetadata.__qualname__ = "FlattenedTensorMetadata"
    module.FlattenedTensorMetadata = FlattenedTensorMetadata
    for name in ("sglang", "sglang.srt", "sglang.srt.weight_sync"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return FlattenedTensorMetadata


def _tensors(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    pairs = zip(shapes, dtypes, strict=False)
    return [
        (f"t{n}", (100 * torch.rand(shape, generator=generator)).to(dtype)) for n, (shape, dtype) in enumerate(pairs)
    ]


def _same(read: dict[str, torch.Tensor], sent: list[tuple[str, torch.Tensor]]) -> bool:
    pairs = [(read[name], tensor) for name, tensor in sent]
    return len(read) == len(sent) and all(a.equal(b) and a.dtype == b.dtype for a, b in pairs)


def test_tensors_lie_one_after_the_other_in_bytes() -> None:
    flat, layout = flatten([("a", torch.ones(2, 3)), ("b", torch.ones(4).bfloat16())])
    assert flat.shape == (32,)
    assert [(p.name, p.start_idx, p.end_idx, p.numel) for p in layout] == [("a", 0, 24, 6), ("b", 24, 32, 4)]


def test_sglang_reads_a_bucket_with_its_own_class(sglang_class: type) -> None:
    sent = _tensors([(2, 3), (4,)], [torch.float32, torch.bfloat16])
    bucket = pickle.loads(base64.b64decode(bucket_payload(sent)))
    first, second = bucket["metadata"]
    assert type(first) is type(second) is sglang_class
    assert (second.name, second.shape, second.dtype) == ("t1", torch.Size([4]), torch.bfloat16)
    raw = bucket["flattened_tensor"]
    assert raw[second.start_idx : second.end_idx].view(torch.bfloat16).equal(sent[1][1])


def test_what_sglang_writes_is_read_as_a_bucket(sglang_class: type) -> None:
    sent = _tensors([(2, 3), (4,)], [torch.float32, torch.float32])
    flat, layout = flatten(sent)
    metadata = [sglang_class(**vars(place)) for place in layout]
    data = pickle.dumps({"flattened_tensor": flat, "metadata": metadata})
    assert _same(load_bucket(base64.b64encode(data).decode()), sent)


SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)


@given(shapes=SHAPES, start=st.integers(0, len(DTYPES) - 1))
def test_every_encoding_keeps_every_bit_of_mixed_dtypes(shapes: list[tuple[int, ...]], start: int) -> None:
    sent = _tensors(shapes, [DTYPES[(start + n) % len(DTYPES)] for n in range(len(shapes))])
    assert _same(load_bucket(bucket_payload(sent)), sent)
    assert _same(load_named_tensors(plain_payload(sent)), sent)
    assert _same(unflatten(*flatten(sent)), sent)


def test_shared_tensors_are_the_senders_memory_and_not_a_copy() -> None:
    sent = [("a", torch.zeros(3)), ("b", torch.zeros(2).bfloat16())]
    payload = shared_payload(sent)
    assert len(payload) < 2000
    sent[0][1][1] = 7.0
    assert load_named_tensors(payload)["a"].tolist() == [0.0, 7.0, 0.0]


@pytest.mark.parametrize(
    ("start", "end", "numel", "shape", "words"),
    [
        (0, 44, 11, (11,), "lie outside"),
        (-4, 4, 2, (2,), "lie outside"),
        (0, 16, 3, (4,), "needs"),
        (0, 16, 4, (-2, -2), "needs"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    start: int, end: int, numel: int, shape: tuple[int, ...], words: str
) -> None:
    place = FlattenedTensorMetadata("a", shape, torch.float32, start, end, numel)
    with pytest.raises(ValueError, match=words):
        unflatten(torch.zeros(40, dtype=torch.uint8), [place])


def test_wide_dtypes_come_first_in_a_bucket_so_that_each_tensor_is_aligned(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    sent = {"a": torch.ones(3).bfloat16(), "b": torch.ones(2), "c": torch.ones(1).to(torch.uint8), "d": torch.ones(1)}
    save_file(sent, tmp_path / "model.safetensors")
    (bucket,) = plan_buckets(tmp_path, 1000)
    assert bucket.names == ("b", "d", "a", "c")
