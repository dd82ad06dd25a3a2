"""How weights are published."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.base import ConfigModel
from agentrl.types.weights import PauseMode

_BUCKET_BYTES = 256 * 2**20


class DiskTransportConfig(ConfigModel):
    """Engines read the staged safetensors themselves: simple, and right wherever they share a disk."""

    kind: Literal["disk"] = "disk"
    """Through a shared disk."""


class BroadcastTransportConfig(ConfigModel):
    """Buckets go to each engine by a collective of its own: for engines without a shared disk."""

    kind: Literal["broadcast"] = "broadcast"
    """By gloo or NCCL."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """gloo between CPUs, NCCL between GPUs."""
    sender_gpu: Annotated[int, Field(ge=0)] = 0
    """Under NCCL, the GPU that sends; one that no engine of the group uses."""
    master_address: str = "auto"
    """The address of the run's machine as the engines see it; ``auto`` is loopback's in a run on one machine, and the
    address by which other machines of the run know this one."""
    ranks_per_engine: Annotated[int, Field(gt=0)] = 1
    """Tensor-parallel size of each engine."""
    bucket_bytes: Annotated[int, Field(gt=0)] = _BUCKET_BYTES
    """Largest bucket; an engine needs that much memory beside its weights."""
    join_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for a group to form."""


class TensorTransportConfig(ConfigModel):
    """Engines on this machine map the weights: shared memory, or CUDA IPC."""

    kind: Literal["tensors"] = "tensors"
    """Through memory that both map."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda:\d+)$")] = "cpu"
    """Where the shared weights lie: ``cpu``, or ``cuda:N`` for CUDA IPC with engines that know GPU N by that number,
    at the price of one more copy of the weights there."""
    ranks_per_engine: Annotated[int, Field(gt=0)] = 1
    """Tensor-parallel size of each engine."""
    bucket_bytes: Annotated[int, Field(gt=0)] = _BUCKET_BYTES
    """Largest bucket."""


class AdapterTransportConfig(ConfigModel):
    """Only the LoRA adapter goes to the engines; needs ``trainer.lora``."""

    kind: Literal["adapter"] = "adapter"
    """The adapter alone, without a pause."""


class DeltaTransportConfig(ConfigModel):
    """Only values that changed go to the engines' host, which rebuilds the weights: for slow links."""

    kind: Literal["delta"] = "delta"
    """Changed values only."""
    folder: Path = Path("/dev/shm/agentrl")
    """Folder on the engines' host for two versions of the weights, best in memory."""
    full_above: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Changed fraction above which a tensor is sent whole."""


TransportConfig = Annotated[
    DiskTransportConfig
    | BroadcastTransportConfig
    | TensorTransportConfig
    | AdapterTransportConfig
    | DeltaTransportConfig,
    Field(discriminator="kind"),
]


class PublishConfig(ConfigModel):
    """Publication of a policy's weights."""

    transport: TransportConfig = DiskTransportConfig()
    """How the bytes reach the engines."""
    pause_mode: PauseMode = PauseMode.ABORT
    """What the pause does to requests in flight: sessions get them back and continue them; or the engine
    requeues them; or it freezes them and they go on with their old KV; or, with ``drain``, no new request is sent to
    the engine for up to `drain_s` before the pause, and sessions get back only what still runs then."""
    drain_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds that ``drain`` lets an engine finish what it generates. Raise it towards the time of the longest replies
    where few are to be cut; lower it where engines stand idle behind a few long ones. An attached engine that others
    use too drains for all of it, since their requests go on coming, and what they have in flight then is cut."""
    max_canary_gap_nats: Annotated[float, Field(gt=0)] = 0.05
    """Largest difference of an engine's canary log-probabilities from the trainer's; about 0.5 for bfloat16."""
    patience_s: Annotated[float, Field(ge=0)] = 2.0
    """Seconds that a publication waits for slower engines once the first serves the version."""
    keep_versions: Annotated[int, Field(gt=1)] = 2
    """Staged versions that stay on disk."""
