from __future__ import annotations

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors.torch import save, save_file

from agentrl.engine.adapter_reader import AdapterReader
from agentrl.engine.request import BadRequestError

CONFIG = {"r": 2, "lora_alpha": 4}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def _write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def _damaged(folder: Path, content: bytes) -> Path:
    _write(folder, {"a": torch.ones(2)})
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def _file(header: object, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


shapes = st.lists(st.integers(0, 5), max_size=3)


@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6), st.integers(0, 99))
def test_what_safetensors_writes_is_read(tmp_path_factory, layout: list[tuple[list[int], torch.dtype]], seed) -> None:
    folder, reader = tmp_path_factory.mktemp("adapter"), AdapterReader()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        tensors = {f"t{n}": torch.randn(shape, generator=generator).to(kind) for n, (shape, kind) in enumerate(layout)}
        config, found = reader.read(_write(folder, tensors))
        assert config == CONFIG
        assert found.keys() == tensors.keys()
        assert all(found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in tensors.items())


def test_the_next_version_comes_into_the_same_memory_and_another_layout_into_its_own(tmp_path: Path) -> None:
    reader = AdapterReader()
    places = []
    for number, shape in enumerate([(2, 3), (2, 3), (3, 2), (2, 3)]):
        tensors = {"a": torch.full(shape, float(number)), "b": torch.full((4,), -float(number))}
        _, found = reader.read(_write(tmp_path / str(number), tensors))
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        places.append(found["a"])
    assert places[0].data_ptr() == places[1].data_ptr()
    assert len({place.data_ptr() for place in places[1:]}) == 3


def test_a_read_that_failed_half_way_harms_no_later_one(tmp_path: Path) -> None:
    reader = AdapterReader()
    tensors = {"a": torch.randn(50), "b": torch.randn(3)}
    good = _write(tmp_path / "good", tensors)
    reader.read(good)
    whole = (good / "adapter_model.safetensors").read_bytes()
    for cut in (4, 40, len(whole) - 4):
        with pytest.raises(BadRequestError, match="cannot be read"):
            reader.read(_damaged(tmp_path / "cut", whole[:cut]))
    _, found = reader.read(good)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08\x00damage",
        (2**62).to_bytes(8, "little") + b"{}",
        _file([], b""),
        _file({"a": 3}, b""),
        _file({"a": {"dtype": "F32", "shape": [1]}}, b"1234"),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        _file({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, b"1234"),
        _file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"1234"),
        _file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, b"1234"),
        _file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}}, b"12345"),
        _file({"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, b"12345678"),
        save({"a": torch.ones(2)})[:-1],
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(BadRequestError, match=rf"the adapter in {tmp_path}/x cannot be read: "):
        AdapterReader().read(_damaged(tmp_path / "x", content))


@pytest.mark.parametrize("content", [None, "{"])
def test_a_folder_without_a_configuration_is_refused(tmp_path: Path, content: str | None) -> None:
    folder = _write(tmp_path / "x", {"a": torch.ones(2)})
    (folder / "adapter_config.json").unlink()
    if content is not None:
        (folder / "adapter_config.json").write_text(content)
    with pytest.raises(BadRequestError, match="cannot be read"):
        AdapterReader().read(folder)
