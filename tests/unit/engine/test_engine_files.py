from __future__ import annotations

import asyncio
import json
import os
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.engine import files
from agentrl.engine.files import Pace, read_in_time, read_tensors
from agentrl.engine.options import EngineOptions
from agentrl.engine.request import BadRequestError
from agentrl.engine.server import EngineServer

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


def test_tensors_of_every_dtype_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PIECE_BYTES", 7)
    written = {str(dtype): (100 * torch.randn(3, 5)).to(dtype) for dtype in DTYPES}
    written |= {"none": torch.zeros(0, 4), "one": torch.tensor(3.0)}
    save_file(written, tmp_path / "a.safetensors", metadata={"format": "pt"})
    read = read_tensors(tmp_path / "a.safetensors", Pace())
    assert read.keys() == written.keys()
    assert all(read[name].dtype == tensor.dtype and read[name].equal(tensor) for name, tensor in written.items())


def _file(path: Path, header: Any, values: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + values)
    return path


def _entry(shape: Any, start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": _entry([2**40], 0, 2**42)}, "shorter than its tensors"),
        ({"a": _entry([2], 0, 8), "b": _entry([2], 0, 8)}, "shorter than its tensors"),
        ({"a": _entry([3], 0, 8)}, "none of its shape"),
        ({"a": _entry([-1, -2], 0, 8)}, "that is none"),
        ({"a": _entry([2], -8, 0)}, "that is none"),
        ({"a": _entry([2], 4, 12)}, "ends early"),
        ({"a": _entry([8], 0, 8, "F8_E4M3")}, "has the dtype F8_E4M3"),
        ({"a": 7}, "cannot be read"),
        ([1], "cannot be read"),
    ],
)
async def test_a_file_that_announces_what_it_has_not_is_refused(tmp_path: Path, header: Any, words: str) -> None:
    path = _file(tmp_path / "a.safetensors", header, bytes(8))
    with pytest.raises(BadRequestError, match=words):
        await read_in_time("weights", lambda pace: read_tensors(path, pace))


async def test_a_disk_that_goes_on_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, has_looked, waiting = 0.0, threading.Event(), threading.current_thread()

    def monotonic() -> float:
        if threading.current_thread() is waiting:
            has_looked.set()
        return now_s

    def slow(pace: Pace) -> str:
        nonlocal now_s
        for _ in range(3):
            now_s += 0.15
            pace.went_on()
            has_looked.clear()
            assert has_looked.wait(60.0)
        return "read"

    monkeypatch.setattr(files, "_STALL_S", 0.2)
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(files, "Pace", lambda: Pace(0.0))
    assert await read_in_time("weights", slow) == "read"


async def test_a_disk_that_stands_still_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_STALL_S", 0.2)
    never = threading.Event()
    with pytest.raises(BadRequestError, match="weights cannot be read: its disk does not answer"):
        await read_in_time("weights", lambda pace: never.wait(60.0))
    never.set()


@pytest.mark.parametrize("route", ["/update_weights_from_disk", "/stage_weights"])
async def test_a_pipe_in_place_of_weights_is_refused_at_once_and_the_next_weights_are_served(
    tiny_model: Path, tmp_path: Path, route: str
) -> None:
    routes = EngineServer(EngineOptions(model=tiny_model, port=1, max_running_requests=2)).control_routes()
    os.mkfifo(tmp_path / "model.safetensors")
    async with asyncio.timeout(20.0):
        with pytest.raises(BadRequestError, match="is no regular file"):
            await routes[route]({"model_path": str(tmp_path), "weight_version": "0.1"})
        answer = await routes[route]({"model_path": str(tiny_model), "weight_version": "0.1"})
    assert answer["success"]


@pytest.mark.parametrize("folder", ["a" * 100_000, "a\0b", "/dev/zero", "/proc/self/fd"])
async def test_a_folder_that_is_none_is_the_callers_fault(tiny_model: Path, folder: str) -> None:
    routes = EngineServer(EngineOptions(model=tiny_model, port=1, max_running_requests=2)).control_routes()
    for route, body in (
        ("/update_weights_from_disk", {"model_path": folder}),
        ("/stage_weights", {"model_path": folder, "weight_version": "0.1"}),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": folder}),
    ):
        with pytest.raises(BadRequestError, match="cannot be read") as caught:
            await routes[route](body)
        assert len(str(caught.value)) < 5000


async def test_weights_that_are_read_are_those_that_the_library_reads(tiny_model: Path) -> None:
    expected = load_file(tiny_model / "model.safetensors")
    read = read_tensors(tiny_model / "model.safetensors", Pace())
    assert read.keys() == expected.keys()
    assert all(read[name].equal(tensor) for name, tensor in expected.items())
