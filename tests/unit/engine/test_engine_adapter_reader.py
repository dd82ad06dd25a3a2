from __future__ import annotations

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors.torch import save, save_file

from agentrl.engine.adapter_file import open_adapter
from agentrl.engine.adapter_reader import read_tensors
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


def _read(folder: Path) -> None:
    with open_adapter(folder) as file:
        json.loads(file.config)
        read_tensors(file)


def _file(header: object, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


shapes = st.lists(st.integers(0, 5), max_size=3)


@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6), st.integers(0, 99))
def test_what_safetensors_writes_is_read(tmp_path_factory, layout: list[tuple[list[int], torch.dtype]], seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"t{n}": torch.randn(shape, generator=generator).to(kind) for n, (shape, kind) in enumerate(layout)}
    with open_adapter(_write(tmp_path_factory.mktemp("adapter"), tensors)) as file:
        found = read_tensors(file)
    assert json.loads(file.config) == CONFIG
    assert found.keys() == tensors.keys()
    assert all(found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in tensors.items())


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
        _read(_damaged(tmp_path / "x", content))


@pytest.mark.parametrize("content", [None, "{"])
def test_a_folder_without_a_configuration_is_refused(tmp_path: Path, content: str | None) -> None:
    folder = _write(tmp_path / "x", {"a": torch.ones(2)})
    (folder / "adapter_config.json").unlink()
    if content is not None:
        (folder / "adapter_config.json").write_text(content)
    with pytest.raises(BadRequestError, match="cannot be read"):
        _read(folder)
