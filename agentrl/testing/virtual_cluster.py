"""A Ray cluster of several nodes on one machine, each a virtual machine with a raylet.

The head runs here, at an address of the virtual network, so that this process can be a driver: a driver needs a raylet
whose sockets it sees. It has no CPU to give unless it is told to, so that what a run starts is on the other nodes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from agentrl.process.ports import free_port
from agentrl.testing.virtual_machines import VirtualMachine, VirtualNetwork
from agentrl.types.errors import ConfigError

_DEADLINE_S = 180.0
_STORE_BYTES = 80_000_000  # the least that Ray takes is 75 MB
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_START = ("start", "--disable-usage-stats", "--include-log-monitor=false", f"--object-store-memory={_STORE_BYTES}")
_HEAD = ("--head", "--no-monitor", "--min-worker-port=0", "--max-worker-port=0")
# Whether Ray asks for tokens must not depend on what is in somebody's home. Drivers have to say the same.
_NO_TOKENS = {"RAY_AUTH_MODE": "disabled"}
# A node that is silent is given up after some ten seconds, not after half a minute.
_ENVIRONMENT = {
    **_NO_TOKENS,
    "RAY_USAGE_STATS_ENABLED": "0",
    # By default workers, and all that they start, give way to whatever else runs on this machine, and starve beside it.
    "RAY_worker_niceness": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass(frozen=True, slots=True)
class NodeShape:
    """What a node has to give."""

    cpus: int = 4
    gpus: int = 0
    """GPUs that Ray counts; there need be none."""
    resources: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that its processes have beside this one's."""


class VirtualCluster:
    """A `head` at `address`, and `nodes` that may be added and killed.

    Use it from the main thread, since what it starts ends with the thread that started it. Its switch for tokens is set
    in this process's environment, too, for drivers that this process is or starts.

    Example: ``with VirtualCluster.start(2, cpus=4, shared=[runs]) as cluster: ray.init(address=cluster.address)``.
    """

    def __init__(self, network: VirtualNetwork, shared: Sequence[Path]) -> None:
        self._network, self._shared = network, tuple(shared)
        self._port, self._folder = free_port(network.host), tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        self._dashboard_port: int | None = None
        self.head: VirtualMachine
        self.nodes: list[VirtualMachine] = []

    @classmethod
    def start(
        cls,
        num_nodes: int,
        cpus: int = 4,
        shared: Sequence[Path] = (),
        head: NodeShape | None = None,
        has_dashboard: bool = False,
    ) -> VirtualCluster:
        """Start a head and nodes of `cpus` each, which see the folders in `shared`; others below /tmp they do not.

        The dashboard has the job server.

        Raises:
            ConfigError: this process may not do it, or Ray does not start; says why.
        """
        with ExitStack() as undone:
            network = undone.enter_context(VirtualNetwork())
            cluster = cls(network, shared)
            undone.callback(cluster.close)
            os.environ.update(_NO_TOKENS)
            cluster._dashboard_port = free_port(network.host) if has_dashboard else None
            cluster._start_head(head or NodeShape(cpus=0))
            cluster.add_nodes([NodeShape(cpus)] * num_nodes)
            undone.pop_all()
        return cluster

    @property
    def host(self) -> str:
        """Address of the head and of this process."""
        return self._network.host

    @property
    def address(self) -> str:
        """Where Ray is joined."""
        return f"{self.host}:{self._port}"

    @property
    def dashboard(self) -> str:
        """URL of the dashboard, where there is one."""
        return f"http://{self.host}:{self._dashboard_port}"

    def add_node(self, shape: NodeShape = NodeShape()) -> VirtualMachine:
        """One more node. Waits for: Ray, until it has joined. Unblocked by: that, or a deadline."""
        return self.add_nodes([shape])[0]

    def add_nodes(self, shapes: Sequence[NodeShape]) -> list[VirtualMachine]:
        """The same for several, side by side."""
        machines = [self._network.add(self._shared) for _ in shapes]
        started = [
            self._ray(machine, shape, f"--address={self.address}")
            for machine, shape in zip(machines, shapes, strict=True)
        ]
        for machine, process in zip(machines, started, strict=True):
            _wait(machine, process)
        self.nodes += machines
        return machines

    def kill_node(self, node: VirtualMachine) -> None:
        """End all processes of a node by SIGKILL."""
        node.kill()
        self.nodes.remove(node)

    def close(self) -> None:
        """End all nodes and the head; nothing is left behind. Safe to call twice."""
        self._network.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start_head(self, shape: NodeShape) -> None:
        self.head = self._network.add_here()
        port = self._dashboard_port
        shown: tuple[str, ...] = ("--include-dashboard=false",)
        if port is not None:
            shown = ("--include-dashboard=true", f"--dashboard-host={self.host}", f"--dashboard-port={port}")
        # Of heads on one machine only one would get the usual port, and the others would take no jobs.
        agent = f"--dashboard-agent-listen-port={free_port(self.host)}"
        head = (*_HEAD, *shown, agent, f"--port={self._port}", f"--temp-dir={self._folder}")
        _wait(self.head, self._ray(self.head, shape, *head))

    def _ray(self, machine: VirtualMachine, shape: NodeShape, *arguments: str) -> subprocess.Popen[bytes]:
        resources = json.dumps(dict(shape.resources))
        given = f"--num-cpus={shape.cpus}", f"--num-gpus={shape.gpus}", f"--resources={resources}"
        return subprocess.Popen(
            machine.command([*_RAY, *_START, f"--node-ip-address={machine.host}", *given, *arguments]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT, **shape.environment},
        )

    def __enter__(self) -> VirtualCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _wait(machine: VirtualMachine, process: subprocess.Popen[bytes]) -> None:
    """Waits for: ``ray start``. Unblocked by: its end, a deadline."""
    try:
        output, _ = process.communicate(timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    if process.returncode != 0:
        words = output.decode(errors="replace").strip()
        raise ConfigError(f"Ray does not start on the virtual machine {machine.host}:\n{words}")
