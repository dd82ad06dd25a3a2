"""What the files of model folders say: nothing sound is refused, and what they cannot tell is one error later."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from agentrl.engine.model import load_network as load_for_engine
from agentrl.models.drawing import write_drawn_model
from agentrl.orchestration.model_files import context_tokens, read_model_files, read_tensors
from agentrl.testing.tiny_architectures import SUPPORTED, tiny_config
from agentrl.trainer.model import load_network as load_for_trainer
from agentrl.types.errors import ConfigError

_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_files_of_every_verified_architecture_are_sound(name: str, tmp_path: Path):
    network = write_drawn_model(tiny_config(name), tmp_path)
    files = read_model_files(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    assert {name: tensor.shape for name, tensor in files.tensors.items()} == shapes
    assert context_tokens(files.config) == network.config.max_position_embeddings


def test_shards_are_read_as_their_index_says(tiny_model: Path, tmp_path: Path):
    whole = load_file(tiny_model / "model.safetensors")
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    places = {name: _SHARDS[n % 2] for n, name in enumerate(sorted(whole))}
    for shard in _SHARDS:
        save_file({name: whole[name] for name, place in places.items() if place == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert {name: tensor.shape for name, tensor in read_model_files(folder).tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in whole.items()
    }
    assert read_tensors(folder) == read_tensors(tiny_model)


@pytest.mark.parametrize("changes", [{"hidden_size": 64}, {"vocab_size": 999}])
def test_what_only_a_load_can_tell_is_one_error_of_either_side(
    changes: dict[str, int], tiny_model: Path, tmp_path: Path
):
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    for load in (
        lambda: load_for_trainer(folder, torch.float32),
        lambda: load_for_engine(folder, torch.float32, "cpu"),
    ):
        with pytest.raises(ConfigError, match="cannot be loaded"):
            load()
