"""Whole weights on their way from a sharded policy to a file, one parameter at a time.

All ranks gather a parameter before rank 0 writes it, and the next is gathered while one is written. So no rank holds
more than `MOST_AT_ONCE` whole parameters, and copies of one while it is merged or digested, however large the model is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash

from agentrl.inference.checksum import checksum_key, tensor_checksum
from agentrl.trainer.lora import LoraLinear, adapters_of
from agentrl.trainer.model import PolicyModel, gathered, saved_buffers
from agentrl.weights.experts import ExpertNames, split_experts

MOST_AT_ONCE = 2
_ALIGNMENT = 8
_ITEM_BYTES = 4


@dataclass(slots=True)
class WrittenWeights:
    """What a file holds: `weight_checksums` of its tensors, how many bytes these take, and the file's own digest."""

    checksums: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)


def whole_parameters(policy: PolicyModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole float32 tensors by their names in the network, adapters merged into the weights that they belong to.

    Buffers that belong to the weights, such as the router biases of DeepSeek-V3, come last; nothing trains them.
    All ranks must exhaust it, since each tensor is gathered from all of them. Tied tensors appear once.
    """
    adapters = adapters_of(policy.network)
    for name, parameter in _base_parameters(policy):
        layer = adapters.get(name.removesuffix(".weight"))
        yield name, gathered(parameter) if layer is None else _merged(gathered(parameter), layer)
    yield from saved_buffers(policy.network).items()


def write_weights(policy: PolicyModel, parameters: Iterator[tuple[str, torch.Tensor]], path: Path) -> WrittenWeights:
    """Write whole parameters of a policy as one file of safetensors, by the names that files have. Raises OSError."""
    written = WrittenWeights()
    names = expert_names(policy)
    pending: Future[None] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="stage") as thread, path.open("wb") as file:
        file.write(header := _header(policy))
        written.digest.update(header)
        for name, whole in parameters:
            if pending is not None:
                pending.result()
            parts = split_experts({name: whole.detach().cpu()}, names)
            pending = thread.submit(_write, file, parts, written)
            del parts
            del whole  # else one more is alive while the next is gathered
        if pending is not None:
            pending.result()
    return written


def file_shapes(policy: PolicyModel) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors that a file of the policy has, by their names there and in their order."""
    inside = [*_base_parameters(policy), *saved_buffers(policy.network).items()]
    names = expert_names(policy)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in inside:
        parts = split_experts({name: torch.empty(tensor.shape, device="meta")}, names)
        shapes |= {part: tuple(view.shape) for part, view in parts.items()}
    return shapes


def expert_names(policy: PolicyModel) -> ExpertNames:
    """How files name the policy's experts."""
    return ExpertNames.of(policy.network.config.model_type)


def weight_checksums(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Digests of float32 weights as they are and as bfloat16, for engines that serve in either."""
    checksums = {name: tensor_checksum(tensor) for name, tensor in weights.items()}
    narrow = {checksum_key("bfloat16", n): tensor_checksum(t.to(torch.bfloat16)) for n, t in weights.items()}
    return checksums | narrow


def _base_parameters(policy: PolicyModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    inside = tuple(f"{name}.lora_" for name in adapters_of(policy.network))
    return ((n, p) for n, p in policy.network.named_parameters() if not n.startswith(inside))


def _merged(whole: torch.Tensor, layer: LoraLinear) -> torch.Tensor:
    """W + (alpha / rank) B A."""
    with torch.no_grad():
        return whole + layer.scale * (gathered(layer.lora_B) @ gathered(layer.lora_A))


def _header(policy: PolicyModel) -> bytes:
    """What stands at the start of a file of safetensors: the length of its JSON, and that, padded with spaces."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for part, shape in file_shapes(policy).items():
        end = start + _ITEM_BYTES * math.prod(shape)
        entries[part] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, parts: dict[str, torch.Tensor], written: WrittenWeights) -> None:
    tensors = dict(parts)
    parts.clear()  # the thread keeps what it was called with a little longer than the call
    for name, tensor in tensors.items():
        plain = tensor.contiguous()
        data = plain.view(-1).view(torch.uint8).numpy().data
        file.write(data)
        written.digest.update(data)
        written.checksums |= weight_checksums({name: plain})
        written.num_bytes += plain.numel() * plain.element_size()
