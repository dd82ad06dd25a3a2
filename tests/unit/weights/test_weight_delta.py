from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from agentrl.inference.checksum import tensor_checksum
from agentrl.types.errors import StorageError
from agentrl.weights.delta_codec import apply_delta, encode_delta


def _folder(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text("{}")
    return path


def _checksums(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


@settings(max_examples=30)
@given(
    changed=st.lists(st.integers(0, 59), max_size=60, unique=True),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    full_above=st.sampled_from([0.1, 0.5, 1.0]),
)
def test_what_is_rebuilt_is_the_new_weights_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, changed: list[int], dtype: torch.dtype, full_above: float
) -> None:
    folder = tmp_path_factory.mktemp("delta")
    old = {"a": torch.randn(6, 10).to(dtype), "b": torch.randn(4).to(dtype), "gone": torch.zeros(2)}
    new = {"a": old["a"].clone(), "b": old["b"], "born": torch.ones(3, dtype=dtype)}
    new["a"].view(-1)[changed] *= -1.5
    new["a"].view(-1)[:1] = -0.0 if 0 in changed else new["a"].view(-1)[:1]
    _folder(folder / "old", old), _folder(folder / "new", new)
    encode_delta(folder / "old", folder / "new", folder / "delta", full_above)
    apply_delta(folder / "old", folder / "delta", folder / "rebuilt", _checksums(new))
    rebuilt = load_file(folder / "rebuilt" / "model.safetensors")
    assert _checksums(rebuilt) == _checksums(new)
    assert json.loads((folder / "rebuilt" / "config.json").read_text()) == {}


def test_few_changes_cost_their_positions_and_values_and_many_cost_the_tensor(tmp_path: Path) -> None:
    old = {"a": torch.zeros(10_000)}
    few = {"a": old["a"].clone()}
    few["a"][[3, 77, 9_999]] = 1.0
    many = {"a": torch.ones(10_000)}
    for name, tensors in (("old", old), ("few", few), ("many", many)):
        _folder(tmp_path / name, tensors)
    header = encode_delta(tmp_path / "old", tmp_path / "old", tmp_path / "none.delta", 0.5)
    assert encode_delta(tmp_path / "old", tmp_path / "few", tmp_path / "few.delta", 0.5) - header < 200
    parts = load_file(tmp_path / "few.delta")
    assert parts["index:a"].tolist() == [3, 77, 9_999]
    assert parts["values:a"].tolist() == [1.0, 1.0, 1.0]
    assert encode_delta(tmp_path / "old", tmp_path / "many", tmp_path / "many.delta", 0.5) > 40_000


def test_weights_rebuilt_on_the_wrong_base_are_refused(tmp_path: Path) -> None:
    old, new = {"a": torch.zeros(100)}, {"a": torch.zeros(100)}
    new["a"][5] = 2.0
    for name, tensors in (("old", old), ("new", new), ("other", {"a": torch.full((100,), 7.0)})):
        _folder(tmp_path / name, tensors)
    encode_delta(tmp_path / "old", tmp_path / "new", tmp_path / "delta", 0.5)
    with pytest.raises(StorageError, match="wrong checksums, such as a"):
        apply_delta(tmp_path / "other", tmp_path / "delta", tmp_path / "rebuilt", _checksums(new))
    assert not (tmp_path / "rebuilt").exists()
