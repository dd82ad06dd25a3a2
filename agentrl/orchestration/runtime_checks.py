"""Whether a recipe can run as its runtime is to be: with shared devices, or on several hosts."""

from __future__ import annotations

from urllib.parse import urlsplit

from agentrl.inference.config import AttachedEngineConfig, SGLangEngineConfig
from agentrl.orchestration.config import PolicyConfig, RunConfig
from agentrl.process.ports import is_loopback
from agentrl.types.errors import ConfigError
from agentrl.types.weights import PauseMode
from agentrl.weights.config import (
    BroadcastTransportConfig,
    DeltaTransportConfig,
    TensorTransportConfig,
    TransportConfig,
)

_MEMORY_SAVER = "enable-memory-saver"
_REACH_ALL = 'set it to "broadcast", or "disk"'


def check_colocated(config: RunConfig) -> None:
    """Whether the engines of a run's trained policies can make room for their trainers. Raises ConfigError."""
    if not config.runtime.colocated:
        return
    for name in config.trained:
        if (reason := _unable(config.policies[name])) is not None:
            raise ConfigError(f"policies.{name}.{reason}; or set runtime.colocated = false")


def _unable(policy: PolicyConfig) -> str | None:
    """Why a policy's engines cannot make room, and what to change; None if they can."""
    if isinstance(policy.engine, AttachedEngineConfig):
        return "engine is attached, and only engines that the run starts make room for its trainer: let it start them"
    if policy.publish.pause_mode is PauseMode.IN_PLACE:
        return 'publish.pause_mode = "in_place" keeps the KV cache that the trainer needs: set "abort" or "retract"'
    args = policy.engine.args
    if isinstance(policy.engine, SGLangEngineConfig) and not (
        args.get(_MEMORY_SAVER) or args.get(_MEMORY_SAVER.replace("-", "_"))
    ):
        return f"engine.args.{_MEMORY_SAVER} is missing, without which SGLang gives no memory back: set it to true"
    return None


def check_several_hosts(config: RunConfig) -> None:
    """Whether a recipe needs nothing that only processes of one host have in common. Raises ConfigError."""
    for name, policy in config.policies.items():
        if (reason := _bound_to_one(policy.publish.transport)) is not None:
            raise ConfigError(f"policies.{name}.publish.transport.{reason}")
    for name, section in config.environments.items():
        local = [url for url in section.servers if is_loopback(urlsplit(url).hostname or "")]
        if local:
            raise ConfigError(
                f"environments.{name}.servers: {local[0]} is another machine to each host that plays episodes; name "
                "the server by an address that all of them reach"
            )


def _bound_to_one(transport: TransportConfig) -> str | None:
    """Why a transport brings weights to engines of the run's own host only, and what to change; None if it does not."""
    match transport:
        case TensorTransportConfig():
            return f'kind = "tensors" shares memory, and engines are on several hosts: {_REACH_ALL}'
        case DeltaTransportConfig():
            return f'kind = "delta" rebuilds weights on one host, and engines are on several: {_REACH_ALL}'
        case BroadcastTransportConfig(master_address=address) if is_loopback(address):
            return f'master_address = "{address}" is another machine to each engine: set it to "auto"'
    return None
