from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from agentrl.engine.model import load_network
from agentrl.engine.weights import WeightStore
from agentrl.inference.checksum import tensor_checksum


def test_a_swap_exchanges_pointers_and_copies_nothing(tiny_model: Path) -> None:
    network = load_network(tiny_model, torch.float32, "cpu")
    store = WeightStore(network)
    tensors = {name: tensor + 1 for name, tensor in load_file(tiny_model / "model.safetensors").items()}
    before = {name: tensor.data_ptr() for name, tensor in network.named_parameters()}
    staged = store.stage(tensors)
    assert {name: tensor.data_ptr() for name, tensor in network.named_parameters()} == before
    store.swap(staged)
    served = dict(network.named_parameters())
    assert {name: served[name].data_ptr() for name in tensors} == {n: t.data_ptr() for n, t in staged.tensors.items()}
    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight


def test_staged_weights_do_not_change_with_what_they_were_read_from(tiny_model: Path) -> None:
    store = WeightStore(load_network(tiny_model, torch.float32, "cpu"))
    tensors = {name: tensor + 1 for name, tensor in load_file(tiny_model / "model.safetensors").items()}
    expected = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    staged = store.stage(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    store.swap(staged)
    assert store.checksums() == expected


def test_checksums_that_were_kept_are_those_of_the_tensors_served_now(tiny_model: Path) -> None:
    store = WeightStore(load_network(tiny_model, torch.float32, "cpu"))
    tensors = load_file(tiny_model / "model.safetensors")
    for step in (1, 2):
        changed = {name: tensor + step for name, tensor in tensors.items()}
        staged = store.stage(changed)
        store.swap(staged.with_digests() if step == 1 else staged)
        assert store.checksums() == {name: tensor_checksum(tensor) for name, tensor in changed.items()}
