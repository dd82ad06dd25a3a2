from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.types.errors import StorageError
from agentrl.weights.buckets import Bucket, plan_buckets


def test_buckets_hold_whole_tensors_up_to_their_size_in_order(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(2, 3),
        "b": torch.zeros(4),
        "c": torch.zeros(100, dtype=torch.bfloat16),
        "d": torch.zeros(1),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert plan_buckets(tmp_path, 64) == [
        Bucket(("a", "b"), ("float32", "float32"), ((2, 3), (4,)), 40),
        Bucket(("c",), ("bfloat16",), ((100,),), 200),
        Bucket(("d",), ("float32",), ((1,),), 4),
    ]
    assert len(plan_buckets(tmp_path, 10_000)) == 1


def test_sharded_files_are_all_read(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
    )
    assert plan_buckets(tmp_path, 1000)[0].names == ("a", "b")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"model\.safetensors cannot be read"):
        plan_buckets(tmp_path, 1000)
