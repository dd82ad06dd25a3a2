"""The policy as the trainer holds it: a Hugging Face model, sharded, that answers log-probabilities."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from agentrl.algorithms.logprobs import chunked_logprobs
from agentrl.models.head import LogitScaling, OutputHead
from agentrl.models.support import fixed_rotary_positions, read_config
from agentrl.trainer.attention import PACKED_ATTENTION
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.lora import add_adapters
from agentrl.trainer.packing import MicroBatch, PackedLayout
from agentrl.trainer.routing import check_replayable, install_replay
from agentrl.types.errors import ConfigError, TrainerError


class PolicyModel(torch.nn.Module):
    """A causal language model whose forward pass gives log-probabilities of a micro-batch's targets.

    The language-model head runs inside `forward`, chunk by chunk, so that sharded weights are whole
    when it needs them. A batch without targets gives every weight a gradient of zero: a rank with an empty
    share must take part in the backward pass of the others.
    """

    def __init__(self, network: PreTrainedModel, chunk_tokens: int) -> None:
        super().__init__()
        self.network = network
        self._chunk_tokens = chunk_tokens
        self._num_replays = install_replay(network)
        self._scaling = LogitScaling.of(network.config)
        self._max_tokens = fixed_rotary_positions(network.config)

    def forward(self, batch: MicroBatch, temperature: float) -> torch.Tensor:
        """logprobs_S of the batch's targets.

        Raises:
            TrainerError: recorded experts cannot be replayed, or a sequence is too long for the model.
        """
        check_replayable(self.network, self._num_replays, batch.layout)
        self._check_length(batch.layout)
        output = self.network.base_model(
            input_ids=batch.input_ids_T[None],
            position_ids=batch.position_ids_T[None],
            use_cache=False,
            layout=batch.layout,
        )
        hidden_SH = output.last_hidden_state[0].index_select(0, batch.sources_S)
        head = OutputHead.of(self.network, self._scaling)
        return chunked_logprobs(hidden_SH, head.logits, batch.targets_S, temperature, self._chunk_tokens, batch.kept)

    def _check_length(self, layout: PackedLayout) -> None:
        longest = layout.gather_NL.shape[1]
        if self._max_tokens is not None and longest > self._max_tokens:
            raise TrainerError(
                f"a sequence has {longest} tokens, but beyond {self._max_tokens} the rotary frequencies of this "
                f"{self.network.config.model_type} depend on what it is packed with; limit the engines' context length"
            )

    def likeliest(self, hidden_H: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` likeliest tokens behind a hidden state, ids_K and logprobs_K at temperature 1.

        Only between a forward pass and `reshard_policy`: until then the head's weights are whole.
        """
        logits_V = OutputHead.of(self.network, self._scaling).logits(hidden_H)
        logprobs_K, ids_K = logits_V.log_softmax(-1).topk(min(count, len(logits_V)))
        return ids_K, logprobs_K


def load_policy(model: Path, config: TrainerConfig) -> PolicyModel:
    """Load and shard a policy over the process group.

    Gradients are averaged over ranks by the sharding, so losses must be scaled by their number.

    Raises:
        ConfigError: there is no such model, or no such layer to adapt.
    """
    network = load_network(model, torch.float32)
    # transformers annotates its `to` as if it took no device.
    as_module: torch.nn.Module = network
    as_module.to(config.device)
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


def reshard_policy(policy: PolicyModel) -> None:
    """Give back the weights that a forward pass gathered: without a backward pass the root keeps them whole."""
    if isinstance(policy, FSDPModule):
        policy.reshard()


def load_network(model: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model from a folder, with attention over packed rows. Raises ConfigError if it is none.

    It is in evaluation mode: what a model drops or adds at random in training mode (dropout, noise of routers)
    would make its log-probabilities others than those that it acted with. Gradients are the same in both.
    """
    read_config(model)
    disable_progress_bar()
    # torch's grouped matrix product, which transformers takes for experts, knows no float64.
    experts = {"experts_implementation": "eager"} if dtype is torch.float64 else {}
    try:
        network: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation=PACKED_ATTENTION, local_files_only=True, **experts
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model {model} cannot be loaded: {error}") from error
    network.eval()
    return network


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


def saved_buffers(network: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Tensors that belong to a model's weights and are no parameters, whole on every rank; by their names."""
    saved = network.state_dict().keys()
    return {name: buffer for name, buffer in network.named_buffers() if name in saved}


def assign_weights(policy: PolicyModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Set parameters and saved buffers to whole tensors by their names in the network; every rank needs all of them."""
    parameters = dict(policy.network.named_parameters()) | saved_buffers(policy.network)
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
