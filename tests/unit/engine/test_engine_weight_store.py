from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl.engine.files import Pace, read_in_time
from agentrl.engine.model import load_network
from agentrl.engine.request import BadRequestError
from agentrl.engine.weights import WeightStore, read_folder
from agentrl.inference.checksum import tensor_checksum
from agentrl.testing.tiny_moe import make_tiny_moe_model
from agentrl.types.errors import ConfigError


@pytest.fixture
def store(tiny_model: Path) -> WeightStore:
    return WeightStore(load_network(tiny_model, torch.float32, "cpu"))


@pytest.fixture
def tensors(tiny_model: Path) -> dict[str, torch.Tensor]:
    return load_file(tiny_model / "model.safetensors")


def _load_folder(store: WeightStore, folder: Path) -> int:
    staged = store.adopt_whole(read_folder(folder, Pace()), "folder")
    store.swap(staged)
    return staged.num_bytes


def test_a_folder_lacking_a_tensor_is_refused_and_nothing_changes(
    store: WeightStore, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    before = store.checksums()
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    lost = sorted(changed)[3]
    del changed[lost]
    save_file(changed, tmp_path / "model.safetensors")
    with pytest.raises(BadRequestError, match=f"the folder lacks 1 tensors, such as {lost}"):
        store.adopt_whole(read_folder(tmp_path, Pace()), "the folder")
    assert store.checksums() == before


def test_a_sharded_folder_is_read_whole(store: WeightStore, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    names = sorted(tensors)
    shards = {"one.safetensors": names[:4], "two.safetensors": names[4:]}
    for file, part in shards.items():
        save_file({name: tensors[name] + 1 for name in part}, tmp_path / file)
    index = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert _load_folder(store, tmp_path) == sum(tensor.nbytes for tensor in tensors.values())
    assert store.checksums() == {name: tensor_checksum(tensor + 1) for name, tensor in tensors.items()}


@pytest.mark.parametrize("content", [None, b"", b"no safetensors at all"])
async def test_a_file_that_cannot_be_read_is_named(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BadRequestError, match=str(tmp_path)):
        await read_in_time(f"weights in {tmp_path}", lambda pace: read_folder(tmp_path, pace))


def test_tied_weights_may_come_under_either_name(store: WeightStore, tensors: dict[str, torch.Tensor]) -> None:
    changed = tensors["model.embed_tokens.weight"] + 1
    store.swap(store.stage({"lm_head.weight": changed}))
    assert store.checksums()["model.embed_tokens.weight"] == tensor_checksum(changed)
    assert "lm_head.weight" not in store.checksums()


def test_float64_weights_have_the_checksums_of_the_float32_ones(tiny_model: Path, store: WeightStore) -> None:
    doubled = WeightStore(load_network(tiny_model, torch.float64, "cpu"))
    assert doubled.checksums() == store.checksums()


def test_a_checksum_sees_dtype_shape_and_every_byte() -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    nudged = tensor.clone()
    nudged[2, 3] += 1e-5
    variants = [tensor, tensor.reshape(4, 3), tensor.bfloat16(), tensor.int(), nudged]
    assert len({tensor_checksum(variant) for variant in variants}) == 5
    assert tensor_checksum(tensor.T.contiguous().T) == tensor_checksum(tensor)
    assert tensor_checksum(torch.tensor(1.0)) != tensor_checksum(torch.tensor([1.0]))


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no model at {tmp_path}: config.json is missing"):
        load_network(tmp_path, torch.float32, "cpu")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"model {tmp_path} cannot be loaded"):
        load_network(tmp_path, torch.float32, "cpu")


def test_a_mixture_of_experts_takes_weights_by_the_names_of_files_whole_or_one_expert_at_a_time(tmp_path):
    folder = make_tiny_moe_model(tmp_path / "model")
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    store = WeightStore(network)
    files = load_file(folder / "model.safetensors")
    assert store.checksums() == {name: tensor_checksum(tensor) for name, tensor in files.items()}
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    served = network.model.layers[1].mlp.experts.gate_up_proj
    before = served.detach().clone()
    store.swap(store.stage({name: files[name] + 1.0}))
    width = before.shape[1] // 2
    assert torch.equal(served[3, width:], before[3, width:] + 1.0)
    assert torch.equal(served[3, :width], before[3, :width])
    assert torch.equal(served[:3], before[:3])
    assert store.checksums()[name] == tensor_checksum(files[name] + 1.0)
    store.release()
    assert store.missing == files.keys()
    store.swap(store.adopt_whole(read_folder(folder, Pace()), "folder"))
    assert torch.equal(served, before)
    assert not store.missing


def test_a_swap_exchanges_pointers_and_copies_nothing(tiny_model: Path, tensors: dict[str, torch.Tensor]) -> None:
    network = load_network(tiny_model, torch.float32, "cpu")
    store = WeightStore(network)
    before = {name: tensor.data_ptr() for name, tensor in network.named_parameters()}
    staged = store.stage(tensors)
    assert {name: tensor.data_ptr() for name, tensor in network.named_parameters()} == before
    store.swap(staged)
    served = dict(network.named_parameters())
    assert {name: served[name].data_ptr() for name in tensors} == {n: t.data_ptr() for n, t in staged.tensors.items()}
    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight


def test_staged_weights_do_not_change_with_what_they_were_read_from(
    store: WeightStore, tensors: dict[str, torch.Tensor]
) -> None:
    tensors = {name: tensor + 1 for name, tensor in tensors.items()}
    expected = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    staged = store.stage(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    store.swap(staged)
    assert store.checksums() == expected


def test_checksums_that_were_kept_are_those_of_the_tensors_served_now(
    store: WeightStore, tensors: dict[str, torch.Tensor]
) -> None:
    for step in (1, 2):
        changed = {name: tensor + step for name, tensor in tensors.items()}
        staged = store.stage(changed)
        store.swap(staged.with_digests() if step == 1 else staged)
        assert store.checksums() == {name: tensor_checksum(tensor) for name, tensor in changed.items()}
