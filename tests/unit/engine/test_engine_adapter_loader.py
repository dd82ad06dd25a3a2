from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.engine import adapter_loader
from agentrl.engine.adapter_file import AdapterFile
from agentrl.engine.adapter_loader import AdapterLoader
from agentrl.engine.lora import FreePlace, LoraStack
from agentrl.engine.model import load_network
from agentrl.engine.request import BadRequestError
from tests.integration.lora_adapters import MadeAdapter, make_adapter

MODULE = "model.layers.0.mlp.up_proj"


class Served:
    """A network, what brings adapters to it, and what one module makes of a row under each serial."""

    def __init__(self, model: Path, max_rank: int = 8, dtype: torch.dtype = torch.float32) -> None:
        self.network = load_network(model, dtype, "cpu")
        self.stack = LoraStack(self.network)
        self.loader = AdapterLoader(self.stack, max_rank)
        self._input_BI = torch.randn(1, 32, dtype=dtype, generator=torch.Generator().manual_seed(5))

    async def load(self, serial: int, folder: Path) -> None:
        self.stack.put(await self.loader.load(serial, folder))

    def change(self, serial: int) -> torch.Tensor:
        linear = self.network.get_submodule(MODULE)
        outputs = []
        for selected in (0, serial):
            self.stack.select(np.asarray([selected]))
            outputs.append(linear(self._input_BI))
        return outputs[1] - outputs[0]

    def expected(self, adapter: MadeAdapter) -> torch.Tensor:
        a_RI, b_OR = (adapter.tensors[f"base_model.model.{MODULE}.lora_{side}.weight"] for side in "AB")
        scale = adapter.config["lora_alpha"] / adapter.config["r"]
        return scale * self._input_BI @ a_RI.to(self._input_BI.dtype).mT @ b_OR.to(self._input_BI.dtype).mT


Serve = Callable[..., Served]


@pytest.fixture
def read_apart(monkeypatch: pytest.MonkeyPatch) -> list[AdapterFile]:
    """The files that were not read straight to where they are served from."""
    files: list[AdapterFile] = []
    read_tensors = adapter_loader.read_tensors

    def noted(file: AdapterFile) -> dict[str, torch.Tensor]:
        files.append(file)
        return read_tensors(file)

    monkeypatch.setattr(adapter_loader, "read_tensors", noted)
    return files


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Makes networks, whose processes end with the test."""
    made: list[Served] = []

    def make(model: Path, **settings: Any) -> Served:
        made.append(Served(model, **settings))
        return made[-1]

    yield make
    for served in made:
        served.loader.close()


def _versions(model: Path, folder: Path, count: int, **settings: object) -> list[MadeAdapter]:
    return [make_adapter(model, folder / f"v{seed}", seed, **settings) for seed in range(1, count + 1)]  # type: ignore[arg-type]


@pytest.mark.parametrize("alpha", [4.0, 8.0])
async def test_later_versions_are_read_to_where_they_are_served(
    serve: Serve, tiny_model: Path, tmp_path: Path, read_apart: list[AdapterFile], alpha: float
) -> None:
    served, versions = serve(tiny_model), _versions(tiny_model, tmp_path, 6, alpha=alpha)
    for serial, version in enumerate(versions, 1):
        await served.load(serial, version.folder)
        if serial > 2:
            served.stack.remove(serial - 2)
        for living in {max(1, serial - 1), serial}:
            assert torch.allclose(served.change(living), served.expected(versions[living - 1]), atol=1e-4)
    assert len(read_apart) == 1


async def test_more_adapters_than_there_is_room_for_make_more(
    serve: Serve, tiny_model: Path, tmp_path: Path, read_apart: list[AdapterFile]
) -> None:
    served, versions = serve(tiny_model), _versions(tiny_model, tmp_path, 6)
    for serial, version in enumerate(versions, 1):
        await served.load(serial, version.folder)
    for serial, version in enumerate(versions, 1):
        assert torch.allclose(served.change(serial), served.expected(version), atol=1e-4)
    assert len(read_apart) == 2


@pytest.mark.parametrize("settings", [{"rank": 2}, {"rank": 8}, {"modules": ("up_proj",)}, {"alpha": 2.0}])
async def test_an_adapter_of_another_kind_in_between_changes_nothing(
    serve: Serve, tiny_model: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    served, versions = serve(tiny_model), _versions(tiny_model, tmp_path / "usual", 4)
    versions[2] = make_adapter(tiny_model, tmp_path / "other", 9, **settings)  # type: ignore[arg-type]
    for serial, version in enumerate(versions, 1):
        await served.load(serial, version.folder)
    for serial, version in enumerate(versions, 1):
        assert torch.allclose(served.change(serial), served.expected(version), atol=1e-4)


async def test_an_engine_of_another_dtype_converts_every_version(
    serve: Serve, tiny_model: Path, tmp_path: Path, read_apart: list[AdapterFile]
) -> None:
    served, versions = serve(tiny_model, dtype=torch.float64), _versions(tiny_model, tmp_path, 3)
    for serial, version in enumerate(versions, 1):
        await served.load(serial, version.folder)
        assert torch.allclose(served.change(serial), served.expected(version), atol=1e-9)
    assert len(read_apart) == 3


async def test_bytes_in_front_of_the_matrices_are_no_part_of_them(
    serve: Serve, tiny_model: Path, tmp_path: Path
) -> None:
    served, versions = serve(tiny_model), _versions(tiny_model, tmp_path, 2)
    for serial, version in enumerate(versions, 1):
        expected = served.expected(version)
        _put_bytes_in_front(version.folder / "adapter_model.safetensors")
        await served.load(serial, version.folder)
        assert torch.allclose(served.change(serial), expected, atol=1e-4)


def _put_bytes_in_front(file: Path) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for entry in header.values():
        entry["data_offsets"] = [offset + 4 for offset in entry["data_offsets"]]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0\0\0\0" + content[8 + length :])


async def test_a_file_that_is_cut_off_is_refused_and_the_next_one_is_whole(
    serve: Serve, tiny_model: Path, tmp_path: Path
) -> None:
    served, versions = serve(tiny_model), _versions(tiny_model, tmp_path, 3)
    await served.load(1, versions[0].folder)
    file = versions[1].folder / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadRequestError, match="cannot be read"):
        await served.loader.load(2, versions[1].folder)
    await served.load(3, versions[2].folder)
    for serial in (1, 3):
        assert torch.allclose(served.change(serial), served.expected(versions[serial - 1]), atol=1e-4)


async def test_an_engine_whose_reading_process_was_killed_reads_once_by_itself(
    serve: Serve, tiny_model: Path, tmp_path: Path, read_apart: list[AdapterFile]
) -> None:
    served, versions = serve(tiny_model), _versions(tiny_model, tmp_path, 4)
    for serial, version in enumerate(versions, 1):
        if serial == 3:
            os.kill(served.loader.filler_pid, signal.SIGKILL)
        if serial == 4:
            served.stack.remove(1)
        await served.load(serial, version.folder)
    for serial in (2, 3, 4):
        assert torch.allclose(served.change(serial), served.expected(versions[serial - 1]), atol=1e-4)
    assert len(read_apart) == 2


async def test_a_disk_that_does_not_answer_is_given_up_and_its_place_is_never_used_again(
    serve: Serve, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, versions = serve(tiny_model), _versions(tiny_model, tmp_path, 5)
    served.loader = AdapterLoader(served.stack, 8, fill_s=5.0)
    lost: list[FreePlace] = []
    lose = served.stack.lose
    monkeypatch.setattr(served.stack, "lose", lambda free: (lost.append(free), lose(free)))
    for serial in (1, 2):
        await served.load(serial, versions[serial - 1].folder)
    os.kill(served.loader.filler_pid, signal.SIGSTOP)
    with pytest.raises(BadRequestError, match="its disk does not answer"):
        await served.loader.load(3, versions[2].folder)
    for serial in (3, 4, 5):
        placed = await served.loader.load(serial, versions[serial - 1].folder)
        assert placed.room is not lost[0].room or placed.place != lost[0].place
        served.stack.put(placed)
    for serial in range(1, 6):
        assert torch.allclose(served.change(serial), served.expected(versions[serial - 1]), atol=1e-4)
