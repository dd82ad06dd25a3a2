"""What a trainer writes: weights that engines and AutoModel read, and checkpoints that it goes on from."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from agentrl.trainer.adapter import adapter_names, read_adapter
from agentrl.trainer.model import PolicyModel, assign_weights, saved_buffers
from agentrl.trainer.optimizer import OptimizerSet
from agentrl.trainer.staging import new_folder
from agentrl.trainer.streaming import expert_names, whole_parameters, write_weights
from agentrl.types.batch import WeightsManifest
from agentrl.types.errors import StorageError
from agentrl.types.version import PolicyVersion
from agentrl.weights.adapter import ADAPTER_FOLDER
from agentrl.weights.delta_codec import copy_companions
from agentrl.weights.digests import write_digests
from agentrl.weights.experts import join_experts

_WEIGHTS = "model.safetensors"
_OPTIMIZER = "optimizer-{}.pt"
_OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)
_UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, SafetensorError, pickle.UnpicklingError)


def stage_weights(
    policy: PolicyModel, source: Path, name: str, version: PolicyVersion, folder: Path
) -> WeightsManifest:
    """Write whole weights and what loads them to a new folder. All ranks must call; rank 0 writes.

    Adapters are merged into the weights that they belong to. The folder appears under its name only when it is
    complete. In memory are a few parameters at once, as `streaming` says.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    parameters = whole_parameters(policy)
    try:
        if dist.get_rank() != 0:
            return WeightsManifest(name, version, str(folder), {}, 0)
        with new_folder(folder, version) as staging:
            written = write_weights(policy, parameters, staging / _WEIGHTS)
            copy_companions(source, staging)
            policy.network.config.save_pretrained(staging)
            write_digests(staging, {_WEIGHTS: written.digest.hexdigest()})
    finally:
        # The other ranks gather to the end with this one, whatever becomes of the file.
        for _ in parameters:
            pass
    return WeightsManifest(name, version, str(folder), written.checksums, written.num_bytes)


def save_checkpoint(policy: PolicyModel, optimizer: OptimizerSet, folder: Path) -> None:
    """Write the optimizer's state beside staged weights. All ranks must call; rank 0 writes.

    The state of an optimizer that never stepped is empty: asked for it, PyTorch would make it step.
    """
    for number, part in enumerate(optimizer.parts):
        state = get_optimizer_state_dict(policy, part, options=_OPTIONS) if part.state else {}
        if dist.get_rank() == 0:
            try:
                torch.save(state, folder / _OPTIMIZER.format(number))
            except (OSError, RuntimeError) as error:
                message = f"optimizer state cannot be written to {folder}: {error}; free space, then resume the run"
                raise StorageError(message) from error


def restore_checkpoint(policy: PolicyModel, optimizer: OptimizerSet, folder: Path) -> None:
    """Take weights and optimizer state from a checkpoint, whatever the number of ranks that wrote it.

    Of a policy with adapters only these are taken; its base is the model that it was loaded from.

    Raises:
        StorageError: something cannot be read or belongs to another model; nothing has changed.
    """
    adapters = adapter_names(policy)
    try:
        weights = read_adapter(folder / ADAPTER_FOLDER) if adapters else _read_whole(policy, folder)
        states = [torch.load(folder / _OPTIMIZER.format(n), weights_only=True) for n in range(len(optimizer.parts))]
    except _UNREADABLE as error:
        raise StorageError(
            f"checkpoint {folder} cannot be read: {type(error).__name__} {error}; restore it from a copy, or move it "
            "away and go on from the one before: `agentrl resume RUN --salvage`"
        ) from error
    tensors = [*policy.network.named_parameters(), *saved_buffers(policy.network).items()]
    shapes = {name: tensor.shape for name, tensor in tensors if not adapters or name in adapters}
    if shapes != {name: tensor.shape for name, tensor in weights.items()}:
        raise StorageError(f"checkpoint {folder} is of another model: names or shapes of its weights differ")
    assign_weights(policy, weights)
    for part, state in zip(optimizer.parts, states, strict=True):
        part.state.clear()
        if state:
            set_optimizer_state_dict(policy, part, state, options=StateDictOptions(full_state_dict=True))


def _read_whole(policy: PolicyModel, folder: Path) -> dict[str, torch.Tensor]:
    return join_experts(load_file(folder / _WEIGHTS), expert_names(policy))
