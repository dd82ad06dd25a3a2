"""The weights of a served model: new ones are checked and copied aside, then exchanged all at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agentrl.engine.files import Pace, read_tensors
from agentrl.engine.request import BadRequestError
from agentrl.inference.checksum import tensor_checksum
from agentrl.weights.buckets import weight_files
from agentrl.weights.experts import ExpertNames, split_experts


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Checked weights in memory of the engine's own, in its dtype and on its device, not yet served.

    `num_bytes` is their size as they came; `digests` holds what is known of their checksums.

    Example: ``StagedWeights({"model.norm.weight": tensor}, 256)``.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    num_bytes: int = 0
    digests: dict[str, str] = field(default_factory=dict)

    def with_more(self, more: StagedWeights) -> StagedWeights:
        """Both together; where both have a tensor, `more` has the newer one."""
        digests = {name: digest for name, digest in self.digests.items() if name not in more.tensors}
        return StagedWeights(self.tensors | more.tensors, self.num_bytes + more.num_bytes, digests | more.digests)

    def with_digests(self) -> StagedWeights:
        """The same with all checksums, so that the pause need not compute them."""
        digests = {name: tensor_checksum(tensor) for name, tensor in self.tensors.items()}
        return StagedWeights(self.tensors, self.num_bytes, digests)


class WeightStore:
    """The tensors of a served model by their names on disk, where experts are apart that a loaded model has fused.

    Staging that names an unknown tensor, lacks one or has one of the wrong shape is refused. It touches
    nothing that is served, so it may run in a thread while tokens are drawn. A swap only exchanges
    pointers; tensors that are served are never written to, which is why their checksums can be kept.
    Tied tensors may be given once.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        self._names = ExpertNames.of(network.config.model_type)
        self._served: dict[str, torch.Tensor] = network.state_dict(keep_vars=True)
        self._whole_shapes = {name: tensor.shape for name, tensor in self._served.items()}
        self._shapes: dict[str, torch.Size] = {}
        self._owners: dict[str, str] = {}
        for whole, tensor in self._served.items():
            parts = split_experts({whole: tensor.data}, self._names)
            self._shapes |= {name: part.shape for name, part in parts.items()}
            self._owners |= dict.fromkeys(parts, whole)
        self._digests: dict[str, str] = {}
        self._missing: set[str] = set()
        owners: dict[int, str] = {}
        self._aliases: dict[str, str] = {}
        for name, tensor in self._served.items():
            owner = owners.setdefault(tensor.data_ptr(), name)
            if owner != name:
                self._aliases[name] = owner

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(iter(self._served.values())).device

    @property
    def missing(self) -> set[str]:
        """Tensors that were released and not brought back yet."""
        return self._missing

    def adopt_whole(self, tensors: Mapping[str, torch.Tensor], source: str) -> StagedWeights:
        """Check all weights, from a folder for instance, as `adopt` does. Raises BadRequestError if one is missing."""
        given = {self._aliases.get(name, name) for name in tensors}
        missing = [name for name in self._shapes if name not in self._aliases and name not in given]
        if missing:
            raise BadRequestError(f"{source} lacks {len(missing)} tensors, such as {missing[0]}")
        return self.adopt(tensors)

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> StagedWeights:
        """Check and copy some weights. Raises BadRequestError."""
        return self._take(tensors, copy=True)

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> StagedWeights:
        """Check some weights whose memory nobody else will write; copies what has another dtype or device.

        Raises:
            BadRequestError: the model has no such tensors.
        """
        return self._take(tensors, copy=False)

    def _take(self, tensors: Mapping[str, torch.Tensor], copy: bool) -> StagedWeights:
        self.check({name: tensor.shape for name, tensor in tensors.items()})
        ours: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            like = self._served[self._owners[name]]
            ours[self._aliases.get(name, name)] = tensor.to(
                like.device, like.dtype, copy=copy, memory_format=torch.contiguous_format
            )
        if self.device.type == "cuda":
            # A copy is only under way when its call returns, and the memory that it reads may go to others then.
            torch.cuda.synchronize(self.device)
        return StagedWeights(ours, sum(tensor.nbytes for tensor in tensors.values()))

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Whether the model has these tensors. Raises BadRequestError."""
        for name, shape in shapes.items():
            if name not in self._shapes:
                raise BadRequestError(f"the model has no tensor {name}")
            if tuple(shape) != tuple(self._shapes[name]):
                raise BadRequestError(
                    f"tensor {name} has shape {tuple(shape)}, the model's is {tuple(self._shapes[name])}"
                )

    def swap(self, staged: StagedWeights) -> list[torch.Tensor]:
        """Serve staged weights from now on; returns the old ones, so that they can be freed in a thread."""
        parts: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        old: list[torch.Tensor] = []
        for name, tensor in staged.tensors.items():
            self._digests.pop(name, None)
            if self._owners[name] == name:
                old.append(self._served[name].data)
                self._served[name].data = tensor
            else:
                parts[self._owners[name]][name] = tensor
        for whole, experts in parts.items():
            old.append(self._served[whole].data)
            self._served[whole].data = self._with_experts(whole, experts)
        self._digests |= staged.digests
        self._missing -= staged.tensors.keys()
        return old

    def release(self) -> None:
        """Give up the memory of all weights; each must be brought back by a swap."""
        for tensor in self._served.values():
            tensor.data = tensor.data.new_empty(0)
        self._missing |= self._shapes.keys() - self._aliases.keys()
        self._digests.clear()

    def checksums(self) -> dict[str, str]:
        """Digest of each tensor as it is served; tied tensors appear once, released ones never."""
        for whole, tensor in self._served.items():
            known = self._aliases.keys() | self._missing | self._digests.keys()
            if tensor.numel():
                parts = split_experts({whole: tensor.data}, self._names)
                self._digests |= {name: tensor_checksum(part) for name, part in parts.items() if name not in known}
        return dict(self._digests)

    def _with_experts(self, whole: str, experts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A copy of a fused tensor in which these experts are new."""
        served = self._served[whole].data
        fresh = served.clone() if served.numel() else served.new_empty(self._whole_shapes[whole])
        places = split_experts({whole: fresh}, self._names)
        for name, tensor in experts.items():
            places[name].copy_(tensor)
        return fresh


def read_folder(folder: Path, pace: Pace) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files. Raises as `read_tensors`, and StorageError."""
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        tensors.update(read_tensors(file, pace))
    return tensors
