"""A Slurm cluster on one machine, whose nodes are virtual machines: Debian's slurmctld, slurmd and munged.

The controller runs here, at an address of the virtual network, so that sbatch, squeue and scancel of this process
reach it by `SLURM_CONF`. Jobs of the partition `high` pre-empt those of `low`, which are told `grace_s` before
they are ended and queued again. All of it ends with this process, however that ends.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from agentrl.testing.virtual_machines import VirtualMachine, VirtualNetwork
from agentrl.types.errors import ConfigError

_TOOLS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "munged": "munge"}
_DEADLINE_S = 120.0
LOW, HIGH = "low", "high"
"""Partitions: jobs of the second pre-empt those of the first."""
# cred_expire is how long a job that is queued again waits before it may start, too: 120 s by default. Programs of
# jobs are found by their parents, and nothing needs control groups, which virtual machines have none of.
_CONFIG = """
ClusterName=agentrl
SlurmctldHost={name}({host})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmctldParameters={controller}
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n/pid
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=2,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={kill_wait_s}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace_s}
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


class SlurmCluster:
    """A controller and `nodes`, by the names node0, node1 and so on.

    Use it from the main thread, since what it starts ends with the thread that started it. `environment` is what
    Slurm's commands need; while the cluster is up this process has it, too.

    Example: ``with SlurmCluster.start(2, cpus=4, shared=[runs]): subprocess.run(["sbatch", script])``.
    """

    def __init__(self, network: VirtualNetwork, shared: Sequence[Path]) -> None:
        self._network = network
        self._folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self._folder.chmod(0o711)  # munged refuses a socket that not everybody reaches
        self._shared = (*shared, self._folder)
        self._here: VirtualMachine
        self._before = os.environ.get("SLURM_CONF")
        self.nodes: list[VirtualMachine] = []

    @classmethod
    def start(
        cls,
        num_nodes: int,
        cpus: int = 4,
        shared: Sequence[Path] = (),
        grace_s: int = 60,
        kill_wait_s: int = 30,
        tells_shells: bool = False,
    ) -> SlurmCluster:
        """Start nodes of `cpus` each, which see the folders in `shared`; others below /tmp they do not.

        A pre-emption is told to the steps of a job; with `tells_shells`, to the batch script by its own signal.

        Raises:
            ConfigError: this process may not do it, or Slurm is not there or does not start; says why.
        """
        if missing := sorted({package for tool, package in _TOOLS.items() if shutil.which(tool) is None}):
            raise ConfigError(f"Slurm is not on this machine: apt-get install {' '.join(missing)}")
        with ExitStack() as undone:
            network = undone.enter_context(VirtualNetwork())
            cluster = cls(network, shared)
            undone.callback(cluster.close)
            cluster._start(num_nodes, cpus, grace_s, kill_wait_s, tells_shells)
            undone.pop_all()
        return cluster

    @property
    def environment(self) -> dict[str, str]:
        """What Slurm's commands need to find this cluster."""
        return {"SLURM_CONF": str(self._folder / "slurm.conf")}

    def asked(self, *command: str) -> str:
        """What a command of Slurm says. Raises CalledProcessError."""
        called = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=_DEADLINE_S,
            env={**os.environ, **self.environment},
        )
        return called.stdout.strip()

    def close(self) -> None:
        """End all nodes and the controller; nothing is left behind. Safe to call twice."""
        self._network.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if os.environ.get("SLURM_CONF") != self.environment["SLURM_CONF"]:
            return
        if self._before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = self._before

    def _start(self, num_nodes: int, cpus: int, grace_s: int, kill_wait_s: int, tells_shells: bool) -> None:
        self._here = self._network.add_here()
        self.nodes = [self._network.add(self._shared) for _ in range(num_nodes)]
        text = _CONFIG.format(
            name=socket.gethostname().partition(".")[0],
            host=self._network.host,
            folder=self._folder,
            grace_s=grace_s,
            kill_wait_s=kill_wait_s,
            controller="preempt_send_user_signal" if tells_shells else "",
        )
        names = [f"node{number}" for number in range(num_nodes)]
        for name, node in zip(names, self.nodes, strict=True):
            (self._folder / name).mkdir()
            text += f"NodeName={name} NodeAddr={node.host} CPUs={cpus} RealMemory=1000\n"
        lines = [line for line in text.splitlines() if not line.endswith("=")]
        (self._folder / "slurm.conf").write_text("\n".join([*lines, ""]))
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # the only one that starts without any
        self._start_munge()
        self._launch("slurmctld", self._here, ["slurmctld", "-D", "-i"])
        for name, node in zip(names, self.nodes, strict=True):
            # A machine has the name of this one, and slurmd goes by it.
            self._launch(name, node, ["unshare", "--uts", "sh", "-c", f"hostname {name}; exec slurmd -D"])
        os.environ.update(self.environment)
        self._wait(lambda: self._states().count("idle") == num_nodes, "no node joins")

    def _start_munge(self) -> None:
        key, socket_path = self._folder / "munge.key", self._folder / "munge.socket"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(64))
        files = {"key": key, "pid": self._folder / "munge.pid", "log": self._folder / "munged.log"}
        given = [f"--{name}-file={path}" for name, path in files.items()]
        seed = f"--seed-file={self._folder / 'munge.seed'}"
        self._launch("munge", self._here, ["munged", "--foreground", f"--socket={socket_path}", seed, *given])
        self._wait(socket_path.exists, "munged does not start")

    def _launch(self, name: str, machine: VirtualMachine, command: Sequence[str]) -> None:
        with (self._folder / f"{name}.output").open("w") as output:
            subprocess.Popen(
                machine.command(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
            )

    def _states(self) -> list[str]:
        """States of the nodes, as the controller has them; empty while it does not answer."""
        try:
            return self.asked("sinfo", "--noheader", "--Node", f"--partition={LOW}", "--format=%T").split()
        except subprocess.CalledProcessError:
            return []

    def _wait(self, holds: Callable[[], bool], complaint: str) -> None:
        """Waits for: a condition. Unblocked by: it, a deadline, which raises ConfigError."""
        until = time.monotonic() + _DEADLINE_S
        while not holds():
            if time.monotonic() > until:
                said = "\n".join(path.read_text()[-2000:] for path in sorted(self._folder.glob("*.output")))
                raise ConfigError(f"{complaint} within {_DEADLINE_S:g} s:\n{said}")
            time.sleep(0.05)

    def __enter__(self) -> SlurmCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
