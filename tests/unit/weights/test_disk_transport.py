from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recording_engine import MANIFEST, RecordingEngine
from safetensors.torch import save_file

from agentrl.types.errors import StorageError
from agentrl.weights.disk import DiskTransport, check_staged


def _stage(folder: Path) -> Path:
    save_file({"a": torch.arange(6.0), "b": torch.ones(2, 3)}, folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


def test_a_whole_file_passes(tmp_path: Path) -> None:
    _stage(tmp_path)
    check_staged(tmp_path)


@pytest.mark.parametrize("left_bytes", [0, 7, 40, -1])
async def test_no_engine_is_told_to_load_a_file_that_is_cut_short(tmp_path: Path, left_bytes: int) -> None:
    file = _stage(tmp_path)
    file.write_bytes(file.read_bytes()[:left_bytes])
    engine = RecordingEngine("a")
    with pytest.raises(StorageError, match=r"staged weights are damaged: .*model.safetensors.*resume the run"):
        await DiskTransport().prepare(engine, replace(MANIFEST, path=str(tmp_path)))  # type: ignore[arg-type]
    assert engine.calls == []


def test_a_file_that_is_too_long_or_no_weights_at_all_is_named(tmp_path: Path) -> None:
    file = _stage(tmp_path)
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(StorageError, match=r"it has \d+ bytes instead of \d+"):
        check_staged(tmp_path)
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(StorageError, match="its header cannot be read"):
        check_staged(tmp_path)
