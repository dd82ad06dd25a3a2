from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.unpickler import load_bucket, load_named_tensors
from agentrl.weights.buckets import plan_buckets
from agentrl.weights.flattened import FlattenedTensorMetadata, plan_layout, unflatten
from agentrl.weights.payloads import shared_payload
from tests.integration.flattened import flatten_by_values

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.uint8)


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
    layout = plan_layout(["a", "b"], [torch.float32, torch.bfloat16], [(2, 3), (4,)])
    assert [(p.name, p.start_idx, p.end_idx, p.numel) for p in layout] == [("a", 0, 24, 6), ("b", 24, 32, 4)]


SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)


@given(shapes=SHAPES, start=st.integers(0, len(DTYPES) - 1))
def test_a_flattened_bucket_is_read_to_the_last_bit_of_mixed_dtypes(shapes: list[tuple[int, ...]], start: int) -> None:
    sent = _tensors(shapes, [DTYPES[(start + n) % len(DTYPES)] for n in range(len(shapes))])
    assert _same(load_bucket(flatten_by_values(sent)), sent)


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
