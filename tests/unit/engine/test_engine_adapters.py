from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from stepping import make_scheduler

from agentrl.engine import adapters, files
from agentrl.engine.adapters import AdapterService
from agentrl.engine.model import ServedModel
from agentrl.engine.options import EngineOptions
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


KINDS: list[dict[str, Any]] = [{}, {"rank": 2}, {"rank": 8}, {"modules": ("up_proj",)}, {"alpha": 2.0}, {}]


def _versions(model: Path, folder: Path, count: int) -> list[MadeAdapter]:
    return [make_adapter(model, folder / f"v{n}", seed=n, **settings) for n, settings in enumerate(KINDS[:count])]


async def test_each_version_is_served_while_those_before_it_are_still_used_whatever_their_kinds(
    tiny_model: Path, tmp_path: Path
) -> None:
    served, used = Served(tiny_model), []
    for number, version in enumerate(_versions(tiny_model, tmp_path, len(KINDS))):
        used.append((await served.load(f"v{number}", version.folder), version))
        assert all(served.serves(*pair) for pair in used)
        if number >= 2:
            await served.unload(f"v{number - 2}")
            del used[0]


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
    answers = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(files, "_STALL_S", 0.2)
        patched.setattr(adapters, "read_adapter", lambda *_arguments: answers.wait(60.0))
        with pytest.raises(BadRequestError, match="its disk does not answer"):
            await served.load("silent", silent.folder)
    assert served.serves(await served.load("next", version.folder), version)
    assert list(served.service.sources()) == ["next"]
    answers.set()


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
async def test_a_pipe_in_place_of_a_file_is_refused_at_once(tiny_model: Path, tmp_path: Path, name: str) -> None:
    served, (version,) = Served(tiny_model), _versions(tiny_model, tmp_path, 1)
    (version.folder / name).unlink()
    os.mkfifo(version.folder / name)
    with pytest.raises(BadRequestError, match=f"{name} is no regular file"):
        async with asyncio.timeout(60.0):
            await served.load("pipe", version.folder)


CONFIG, MATRICES = b'{"r": 2, "lora_alpha": 4}', save({"a": torch.ones(2)})


@pytest.mark.parametrize(
    ("config", "matrices"),
    [
        (None, MATRICES),
        (b"{", MATRICES),
        (CONFIG, b""),
        (CONFIG, b"\x08\x00damage"),
        (CONFIG, (2**62).to_bytes(8, "little") + b"{}"),
        (CONFIG, save({})[:-1]),
    ],
)
async def test_a_damaged_folder_is_refused(
    tiny_model: Path, tmp_path: Path, config: bytes | None, matrices: bytes
) -> None:
    if config is not None:
        (tmp_path / "adapter_config.json").write_bytes(config)
    (tmp_path / "adapter_model.safetensors").write_bytes(matrices)
    with pytest.raises(BadRequestError, match=f"the adapter in {tmp_path} cannot be read: "):
        await Served(tiny_model).load("damaged", tmp_path)
