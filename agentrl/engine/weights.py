"""Takes new weights into a served model: checks everything first, then changes everything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from agentrl.engine.request import BadRequestError
from agentrl.inference.checksum import tensor_checksum


class WeightStore:
    """The tensors of a served model by their names on disk.

    A load that names an unknown tensor, lacks one or has one of the wrong shape changes nothing. Tied
    tensors may be given once.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        self._tensors = network.state_dict()
        owners: dict[int, str] = {}
        self._aliases: dict[str, str] = {}
        for name, tensor in self._tensors.items():
            owner = owners.setdefault(tensor.data_ptr(), name)
            if owner != name:
                self._aliases[name] = owner

    def load_folder(self, folder: Path) -> int:
        """Take all weights from a folder of safetensors; returns their bytes. Raises BadRequestError."""
        tensors = read_folder(folder)
        given = {self._aliases.get(name, name) for name in tensors}
        missing = [name for name in self._tensors if name not in self._aliases and name not in given]
        if missing:
            raise BadRequestError(f"{folder} lacks {len(missing)} tensors, such as {missing[0]}")
        return self.load(tensors)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Take some weights; returns their bytes. Raises BadRequestError."""
        for name, tensor in tensors.items():
            if name not in self._tensors:
                raise BadRequestError(f"the model has no tensor {name}")
            if tensor.shape != self._tensors[name].shape:
                shapes = f"{tuple(tensor.shape)}, the model's is {tuple(self._tensors[name].shape)}"
                raise BadRequestError(f"tensor {name} has shape {shapes}")
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._tensors[name].copy_(tensor)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def checksums(self) -> dict[str, str]:
        """Digest of each tensor as it is served; tied tensors appear once."""
        return {name: tensor_checksum(tensor) for name, tensor in self._tensors.items() if name not in self._aliases}


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files. Raises BadRequestError."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = ["model.safetensors"]
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            tensors.update(load_file(folder / name))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise BadRequestError(f"weights in {folder} cannot be read: {error}") from error
    return tensors
