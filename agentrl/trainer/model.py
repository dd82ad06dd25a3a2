"""The policy as the trainer holds it: a Hugging Face model, sharded, that answers log-probabilities."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from agentrl.algorithms.logprobs import chunked_logprobs
from agentrl.trainer.attention import PACKED_ATTENTION
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.lora import add_adapters
from agentrl.trainer.packing import MicroBatch
from agentrl.trainer.routing import check_replayable, install_replay
from agentrl.types.errors import ConfigError


class PolicyModel(torch.nn.Module):
    """A causal language model whose forward pass gives log-probabilities of a micro-batch's targets.

    The language-model head runs inside `forward`, chunk by chunk, so that sharded weights are whole
    when it needs them.
    """

    def __init__(self, network: PreTrainedModel, chunk_tokens: int) -> None:
        super().__init__()
        self.network = network
        self._chunk_tokens = chunk_tokens
        self._num_replays = install_replay(network)

    def forward(self, batch: MicroBatch, temperature: float) -> torch.Tensor:
        """logprobs_S of the batch's targets. Raises TrainerError if recorded experts cannot be replayed."""
        check_replayable(self.network, self._num_replays, batch.layout)
        output = self.network.base_model(
            input_ids=batch.input_ids_T[None],
            position_ids=batch.position_ids_T[None],
            use_cache=False,
            layout=batch.layout,
        )
        hidden_SH = output.last_hidden_state[0].index_select(0, batch.sources_S)
        head_VH = self.network.get_output_embeddings().weight
        logprobs_S = chunked_logprobs(hidden_SH, head_VH, batch.targets_S, temperature, self._chunk_tokens, batch.kept)
        # A rank without targets must still take part in the backward pass of the others.
        return logprobs_S + 0.0 * output.last_hidden_state[0, 0, 0].float()


def load_policy(model: Path, config: TrainerConfig) -> PolicyModel:
    """Load and shard a policy over the process group.

    Gradients are averaged over ranks by the sharding, so losses must be scaled by their number.

    Raises:
        ConfigError: there is no such model, or no such layer to adapt.
    """
    if not (model / "config.json").is_file():
        raise ConfigError(f"no model at {model}: config.json is missing; give a folder made by save_pretrained")
    disable_progress_bar()
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation=PACKED_ATTENTION, local_files_only=True
    ).to(config.device)
    network.train()
    if config.lora is not None:
        add_adapters(network, config.lora)
    policy = PolicyModel(network, config.logprob_chunk_tokens)
    mesh = init_device_mesh(config.device, (dist.get_world_size(),))
    compute = getattr(torch, config.dtype)
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for block in _blocks(network):
        if config.activation_checkpointing:
            # Inside the hooks of the sharding, so that weights are gathered once for computing again and backward.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    return policy


def full_weights(policy: PolicyModel, names: Container[str] | None = None) -> dict[str, torch.Tensor]:
    """Whole tensors, all or some, by their names in the network, on the CPU of rank 0; empty on other ranks.

    All ranks must call. Tied tensors appear once.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in policy.network.named_parameters():
        if names is not None and name not in names:
            continue
        whole = gathered(parameter)
        if dist.get_rank() == 0:
            weights[name] = whole.detach().cpu().contiguous()
    return weights


def gathered(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter as one tensor; all ranks must call."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def assign_weights(policy: PolicyModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Set parameters to whole tensors by their names in the network; every rank needs all of them."""
    parameters = dict(policy.network.named_parameters())
    with torch.no_grad():
        for name, whole in weights.items():
            parameter = parameters[name]
            parameter.copy_(_laid_out_like(whole.to(parameter.device), parameter))


def _laid_out_like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _blocks(network: PreTrainedModel) -> list[torch.nn.Module]:
    """The repeated layers, as the model itself names them."""
    names = set(network._no_split_modules or ())
    return [module for module in network.modules() if type(module).__name__ in names]
