from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from stepping import make_scheduler

from agentrl.engine import adapters
from agentrl.engine.adapters import AdapterService
from agentrl.engine.model import ServedModel
from agentrl.engine.options import EngineOptions
from agentrl.engine.peft import read_adapter
from agentrl.engine.request import BadRequestError
from tests.integration.lora_adapters import MadeAdapter, make_adapter

MODULE = "model.layers.0.mlp.up_proj"


class Served:
    """A model, the routes that bring adapters to it, and what one module makes of a row under each serial."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.model = ServedModel(EngineOptions(model=model, port=1, max_running_requests=2, **options))
        self.service = AdapterService(self.model.lora, make_scheduler(self.model, 2, prefill_tokens=64), max_rank=8)
        self._routes = self.service.routes()
        self._input_BI = torch.randn(1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    async def load(self, name: str, folder: Path) -> int:
        """Serial of the adapter."""
        await self._routes["/load_lora_adapter"]({"lora_name": name, "lora_path": str(folder)})
        return self.service.serial_of(name)

    async def unload(self, name: str) -> None:
        await self._routes["/unload_lora_adapter"]({"lora_name": name})

    def serves(self, serial: int, adapter: MadeAdapter, tolerance: float = 1e-4) -> bool:
        linear = self.model.network.get_submodule(MODULE)
        outputs = []
        for selected in (0, serial):
            self.model.lora.select(np.asarray([selected]))
            outputs.append(linear(self._input_BI.to(linear.weight.dtype)).double())
        a_RI, b_OR = (adapter.tensors[f"base_model.model.{MODULE}.lora_{side}.weight"].double() for side in "AB")
        expected = adapter.config["lora_alpha"] / adapter.config["r"] * self._input_BI @ a_RI.mT @ b_OR.mT
        return torch.allclose(outputs[1] - outputs[0], expected, atol=tolerance)


def _versions(model: Path, folder: Path, count: int, **settings: Any) -> list[MadeAdapter]:
    return [make_adapter(model, folder / f"v{seed}", seed, **settings) for seed in range(1, count + 1)]


async def test_each_version_is_served_while_the_one_before_it_is_still_used(tiny_model: Path, tmp_path: Path) -> None:
    served, before = Served(tiny_model), None
    for number, version in enumerate(_versions(tiny_model, tmp_path, 6)):
        serial = await served.load(f"v{number}", version.folder)
        assert served.serves(serial, version)
        if before is not None:
            assert served.serves(*before)
            await served.unload(f"v{number - 1}")
        before = serial, version


@pytest.mark.parametrize("settings", [{}, {"rank": 2}, {"rank": 8}, {"modules": ("up_proj",)}, {"alpha": 2.0}])
async def test_more_adapters_than_there_is_room_for_are_served_together_whatever_their_kind(
    tiny_model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    served, versions = Served(tiny_model), _versions(tiny_model, tmp_path / "usual", 5)
    versions[2] = make_adapter(tiny_model, tmp_path / "other", 9, **settings)
    serials = [await served.load(f"v{number}", version.folder) for number, version in enumerate(versions)]
    assert all(served.serves(serial, version) for serial, version in zip(serials, versions, strict=True))


async def test_an_engine_of_another_dtype_converts_adapters(tiny_model: Path, tmp_path: Path) -> None:
    served, (version,) = Served(tiny_model, deterministic=True), _versions(tiny_model, tmp_path, 1)
    assert served.serves(await served.load("v1", version.folder), version, tolerance=1e-9)


async def test_a_file_that_is_cut_off_is_refused_and_the_next_one_is_whole(tiny_model: Path, tmp_path: Path) -> None:
    served, (first, cut, third) = Served(tiny_model), _versions(tiny_model, tmp_path, 3)
    serial = await served.load("first", first.folder)
    file = cut.folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(BadRequestError, match=f"the adapter in {cut.folder} cannot be read"):
        await served.load("cut", cut.folder)
    assert served.serves(await served.load("third", third.folder), third)
    assert served.serves(serial, first)


async def test_a_disk_that_does_not_answer_is_given_up_and_the_next_adapter_is_served(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, (silent, version) = Served(tiny_model), _versions(tiny_model, tmp_path, 2)
    config = silent.folder / "adapter_config.json"
    config.unlink()
    os.mkfifo(config)
    monkeypatch.setattr(adapters, "_READ_S", 0.2)
    with pytest.raises(BadRequestError, match="its disk does not answer"):
        await served.load("silent", silent.folder)
    monkeypatch.setattr(adapters, "_READ_S", 60.0)
    assert served.serves(await served.load("next", version.folder), version)
    assert list(served.service.sources()) == ["next"]
    config.write_text("{}")  # lets the thread end that reads it


@pytest.mark.parametrize("content", [b"", b"\x08\x00damage", (2**62).to_bytes(8, "little") + b"{}", save({})[:-1]])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4}))
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(BadRequestError, match=f"the adapter in {tmp_path} cannot be read: "):
        read_adapter(tmp_path, max_rank=8)


@pytest.mark.parametrize("content", [None, "{"])
def test_a_folder_without_a_configuration_is_refused(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(save({"a": torch.ones(2)}))
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(BadRequestError, match="cannot be read"):
        read_adapter(tmp_path, max_rank=8)
