"""Puts together what serves one policy: fleet, router, transport, publisher, and who looks after them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.inference.fleet import Fleet
from agentrl.inference.router import EngineRouter
from agentrl.inference.supervision import FleetSupervisor
from agentrl.orchestration.config import PolicyConfig
from agentrl.process.ports import LOOPBACK
from agentrl.protocols import Engine, Runtime, WeightTransport
from agentrl.types.batch import WeightsManifest
from agentrl.types.weights import PauseMode
from agentrl.weights.adapter import AdapterTransport
from agentrl.weights.broadcast import BroadcastTransport
from agentrl.weights.config import (
    AdapterTransportConfig,
    BroadcastTransportConfig,
    DeltaTransportConfig,
    DiskTransportConfig,
    TensorTransportConfig,
)
from agentrl.weights.delta import DeltaTransport
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import StagedPublisher
from agentrl.weights.resync import Resynchronizer
from agentrl.weights.tensors import TensorTransport

Service = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Serving:
    """What serves one policy; `services` are loops that run as long as the run does."""

    fleet: Fleet
    router: EngineRouter
    publisher: StagedPublisher
    services: tuple[Service, ...]

    def metrics(self) -> dict[str, float]:
        """What was counted of engines, requests and publications since the run's process began."""
        return {**self.fleet.metrics(), **self.router.metrics(), **self.publisher.metrics()}


def build_serving(
    policy: PolicyConfig,
    engines: Sequence[Engine],
    runtime: Runtime,
    first: WeightsManifest,
    logs: Path,
    host: str = LOOPBACK,
    still_s: float = 0.0,
) -> Serving:
    """Everything between a policy's engines and those who use them.

    `first` is what the engines hold now, `host` this machine's address as they see it. All of them may stand still for
    a step, for up to `still_s` seconds.
    """
    fleet = Fleet(engines, first.version)
    wait_s = _wait_s(policy) + still_s
    transport = build_transport(policy, logs, host)
    publisher = StagedPublisher(fleet, transport, policy.publish, first, wait_s)
    supervisor = FleetSupervisor(fleet, runtime, policy.fleet)
    resynchronizer = Resynchronizer(fleet, publisher)
    router = EngineRouter(fleet, wait_s)
    return Serving(fleet, router, publisher, (supervisor.run, resynchronizer.run))


def _wait_s(policy: PolicyConfig) -> float:
    """Seconds that work waits for an engine: one that comes back, or has drained, must find those who waited for it."""
    drain_s = policy.publish.drain_s if policy.publish.pause_mode is PauseMode.DRAIN else 0.0
    return max(policy.fleet.wait_s, policy.fleet.dead_s + policy.engine.start_s + policy.client.load_s) + drain_s


def build_transport(policy: PolicyConfig, logs: Path, host: str) -> WeightTransport:
    """The transport that a policy's configuration asks for; `host` is this machine's address as the engines see it."""
    config, load_s = policy.publish.transport, policy.client.load_s
    match config:
        case BroadcastTransportConfig():
            return BroadcastTransport(config, load_s, logs, host)
        case TensorTransportConfig():
            return TensorTransport(config, load_s, logs)
        case DeltaTransportConfig():
            return DeltaTransport(config, load_s, logs)
        case AdapterTransportConfig():
            return AdapterTransport()
        case DiskTransportConfig():
            return DiskTransport()


def evaluation_transport(policy: PolicyConfig) -> WeightTransport:
    """What brings staged weights to the evaluation's engine, which reads the run's folder."""
    return AdapterTransport() if isinstance(policy.publish.transport, AdapterTransportConfig) else DiskTransport()
