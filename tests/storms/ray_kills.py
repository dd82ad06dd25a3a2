"""A real run on the virtual nodes of a Ray cluster, of which anything is killed at random while it goes on.

The run plays the counting SQL environment and learns. After each kill it stands still for a moment, and its journal is
held against all that earlier looks had on record; then it has to make a step that had not begun at the time of the
kill. A driver that was killed is started anew by the same command, as a job system does it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from agentrl.testing.virtual_cluster import NodeShape, VirtualCluster
from agentrl.testing.virtual_machines import VirtualMachine
from tests.storms.kill_runs import KilledRun
from tests.storms.kill_unprotected import VARIABLE
from tests.storms.run_account import account_of

NODE = NodeShape(cpus=4)
NUM_NODES = 2
EVALUATED = ("evaluation.interval_steps=5", "evaluation.tasks=16", "evaluation.final_tasks=16")
"""So that a run has an engine of its evaluation all the time, and a worker now and then."""
STEPS_PER_KILL = 4  # what a run makes at most, on average, until it has gone on behind one and the next comes
MOST_UNPROTECTED_KILLS = 40
_JUDGED_STEPS = 20
_DEADLINE_S = 300.0
_FINISH_S = 3600.0
_MEAN_DELAY_S = 0.5
_FRESH_STEPS = 2  # the first of them may have been under way at the time of the kill


class Victim(StrEnum):
    """What is killed, by SIGKILL; an actor is the process of Ray whose child a member of the run is."""

    WORKER = "worker"
    WORKER_ACTOR = "worker_actor"
    ENGINE = "engine"
    ENGINE_ACTOR = "engine_actor"
    TRAINER = "trainer"
    TRAINER_ACTOR = "trainer_actor"
    EVALUATOR = "evaluator"
    EVALUATION_ENGINE = "evaluation_engine"
    RAYLET = "raylet"
    NODE = "node"
    DRIVER = "driver"


_LOGS = {
    Victim.WORKER: "worker-",
    Victim.ENGINE: "engine-main-",
    Victim.TRAINER: "trainer-",
    Victim.EVALUATOR: "evaluator",
    Victim.EVALUATION_ENGINE: "engine-main-evaluation",
}
"""How logs of members begin."""
_ACTORS = {
    Victim.WORKER_ACTOR: Victim.WORKER,
    Victim.ENGINE_ACTOR: Victim.ENGINE,
    Victim.TRAINER_ACTOR: Victim.TRAINER,
}


_ALWAYS = (Victim.RAYLET, Victim.NODE, Victim.DRIVER)


class JobRun(KilledRun):
    """A run that is started, and gone on with, by one command, as a job that is retried."""

    def _arguments(self) -> list[str]:
        return [*self.train_arguments(), "--resume"]

    def bound_steps(self) -> int:
        """The same in the command."""
        steps = super().bound_steps()
        self.overrides = (*self.overrides, f"steps={steps}")
        return steps


@dataclass(slots=True)
class RayStorm:
    """One run on a cluster, and what was killed of it.

    `recovery_s` has, by victim, the seconds from each kill to the end of a step that had not begun then.
    """

    cluster: VirtualCluster
    run: JobRun
    recovery_s: dict[Victim, list[float]] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] = field(init=False)

    @classmethod
    def of(
        cls,
        cluster: VirtualCluster,
        folder: Path,
        model: Path,
        overrides: Sequence[str],
        module: str = "agentrl.cli.main",
    ) -> RayStorm:
        """A run that has not begun; `folder` and `model` are seen by all nodes."""
        return cls(cluster, JobRun(folder, model, module, (*_overrides(cluster), *overrides)))

    @contextmanager
    def working(self) -> Iterator[None]:
        """The run, at work; whatever is left of it is killed at the end of the block."""
        self._process = self.run.start()
        try:
            self._wait_until(lambda: self.newest_step() > 0, "make a step")
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self.run.wait_for_nobody()

    def strike(self, victim: Victim, rng: random.Random) -> None:
        """Kill one, look at what is on record, and let the run make a step that begins then."""
        self._kill(victim, rng)
        started, step = time.monotonic(), self.newest_step()
        # Some looks are at the moment of the kill, others when its episodes have gone on.
        time.sleep(rng.choice((0.0, 0.3)))
        with self._halted():
            self.run.verdict.look()
        self._replace(victim)
        self._wait_until(lambda: self.newest_step() >= step + _FRESH_STEPS, f"make a step after the kill of: {victim}")
        took_s = time.monotonic() - started
        self.recovery_s.setdefault(victim, []).append(took_s)
        self.run.kills += 1
        say(f"kill {self.run.kills}: {victim}; on after {took_s:.1f} s; {self.faults()} faults so far")
        time.sleep(rng.expovariate(1 / _MEAN_DELAY_S))

    def cut_short(self) -> None:
        """Kill the driver, and let the run that is started then make its last steps."""
        self._kill(Victim.DRIVER, random.Random())
        self.run.verdict.look()
        self.run.bound_steps()
        self._process = self.run.start()
        self.finish()

    def finish(self) -> None:
        """Wait for the run's own end; nothing of it may be left on any node, and every episode is on its ledger."""
        if self._process.wait(_FINISH_S) != 0:
            raise RuntimeError(f"the run did not finish:\n{self.run.output()}")
        self.run.wait_for_nobody()
        self.run.verdict.close()
        self.run.account = account_of(self.run.run, self.run.verdict.tokens, [], self.run.temporary)

    def success(self) -> tuple[float, float]:
        """Mean reward of the groups of the last steps, as the ledger has them, and its standard error."""
        lines = [json.loads(line) for line in (self.run.run / "ledger.jsonl").read_text().splitlines()]
        trained = [line for line in lines if line["outcome"] == "trained"]
        first = max(line["step"] for line in trained) - _JUDGED_STEPS
        groups: dict[int, list[float]] = {}
        for line in trained:
            if line["step"] > first:
                groups.setdefault(line["group"], []).append(line["reward"])
        means = [statistics.fmean(rewards) for rewards in groups.values()]
        return statistics.fmean(means), statistics.stdev(means) / len(means) ** 0.5

    def step_s(self) -> float:
        """Seconds from one step to the next, as the run's metrics have them; the median."""
        times = [row["time"] for row in self._metrics() if "trainer/loss" in row]
        return statistics.median(after - before for before, after in itertools.pairwise(times))

    def faults(self) -> int:
        """Turns lost, made again, and effects that happened twice."""
        verdict = self.run.verdict
        return verdict.turns_lost + verdict.effects_twice + verdict.regenerated

    def newest_step(self) -> int:
        """The newest step of the run's metrics, some of which are taken back as it goes on from a checkpoint."""
        return max((row["step"] for row in self._metrics()), default=0)

    def members(self, victim: Victim) -> list[int]:
        """Processes of a kind that run now."""
        if victim in _ACTORS:
            return [parent_of(pid) for pid in self.members(_ACTORS[victim])]
        found = {pid: _log_of(pid) for pid, _ in self.run.processes()}
        kinds = {pid: _kind_of(log.name) for pid, log in found.items() if log.parent == self.run.run / "logs"}
        return [pid for pid, kind in kinds.items() if kind is victim]

    def victims(self) -> list[Victim]:
        """What can be killed now."""
        return [victim for victim in Victim if victim in _ALWAYS or self.members(victim)]

    def _kill(self, victim: Victim, rng: random.Random) -> None:
        if victim is Victim.DRIVER:
            self._process.kill()
            self._process.wait()
            self.run.wait_for_nobody()
        elif victim is Victim.NODE:
            self.cluster.kill_node(rng.choice(self.cluster.nodes))
        elif victim is Victim.RAYLET:
            self._kill_raylet(rng.choice(self.cluster.nodes))
        else:
            self._wait_until(lambda: bool(self.members(victim)), f"have its {victim}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(self.members(victim)), signal.SIGKILL)

    def _kill_raylet(self, node: VirtualMachine) -> None:
        """Kill a node's raylet: what the run had there ends, though the machine goes on."""
        [raylet] = programs_on(node, "raylet")
        os.kill(raylet, signal.SIGKILL)
        self._wait_until(lambda: not any(_is_on(node, pid) for pid, _ in self.run.processes()), "leave the node")
        self.cluster.kill_node(node)

    def _replace(self, victim: Victim) -> None:
        """Bring what the cluster, or the job system, would bring."""
        if victim in (Victim.NODE, Victim.RAYLET):
            self.cluster.add_node(NODE)
        if victim is Victim.DRIVER:
            self._process = self.run.start()

    def _wait_until(self, holds: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + _DEADLINE_S
        while not holds():
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"the run ended ({self._process.returncode}), and was to {what}:\n{self.run.output()}"
                )
            if time.monotonic() > until:
                raise RuntimeError(f"the run does not {what}; it said last:\n{self.run.output()}")
            time.sleep(0.05)

    @contextmanager
    def _halted(self) -> Iterator[None]:
        """All of the run stands still inside."""
        pids = {pid for pid, _ in self.run.processes()} | {self._process.pid}
        _signal(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(pids, signal.SIGCONT)

    def _metrics(self) -> list[dict[str, float]]:
        file = self.run.run / "metrics.jsonl"
        whole_lines = file.read_text().rpartition("\n")[0] if file.is_file() else ""
        return [json.loads(line) for line in whole_lines.splitlines()]


def play_calm(cluster: VirtualCluster, folder: Path, model: Path, steps: int) -> RayStorm:
    """A run that nothing is killed of."""
    storm = RayStorm.of(cluster, folder, model, (f"steps={steps}", *EVALUATED))
    with storm.working():
        storm.finish()
    return storm


def kill_at_random(
    cluster: VirtualCluster, folder: Path, model: Path, num_kills: int, steps: int, seed: int
) -> RayStorm:
    """A run of which anything is killed at random, so many times, finished at last."""
    storm, rng = RayStorm.of(cluster, folder, model, (f"steps={steps}", *EVALUATED)), random.Random(seed)
    with storm.working():
        for _ in range(num_kills):
            storm.strike(rng.choice(storm.victims()), rng)
        storm.finish()
    return storm


def found_without_tokens(cluster: VirtualCluster, folder: Path, model: Path, seed: int) -> int:
    """Workers that have to be killed to find a fault where fencing tokens do not rise; 0 if they did not find one."""
    storm = RayStorm.of(cluster, folder, model, ("steps=100000",), "tests.storms.kill_unprotected")
    return _kill_until_found(storm, "one_token", seed)


def found_without_journal(cluster: VirtualCluster, folder: Path, model: Path, seed: int) -> int:
    """The same without a journal."""
    storm = RayStorm.of(cluster, folder, model, ("steps=100000", "journal.kind=none"))
    return _kill_until_found(storm, "", seed)


def _kill_until_found(storm: RayStorm, protection: str, seed: int) -> int:
    os.environ[VARIABLE], rng = protection, random.Random(seed)
    with storm.working():
        for number in range(1, MOST_UNPROTECTED_KILLS + 1):
            storm.strike(rng.choice((Victim.WORKER, Victim.WORKER_ACTOR)), rng)
            say(f"without a protection, kill {number}: {storm.faults()} faults")
            if storm.faults():
                return number
    return 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def programs_on(machine: VirtualMachine, name: str) -> list[int]:
    """Processes of a machine whose program is named so, as this machine counts."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and _is_on(machine, int(entry.name)):
                program = (entry / "cmdline").read_text().partition("\0")[0]
                found += [int(entry.name)] if Path(program).name == name else []
    return found


def parent_of(pid: int) -> int:
    """The parent of a process, which is not gone."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _overrides(cluster: VirtualCluster) -> tuple[str, ...]:
    """The run of `kill_runs`, on the nodes of a cluster, so that it learns and may lose any number of processes."""
    return (
        "runtime.kind=ray",
        f"runtime.address={cluster.address}",
        "runtime.elastic=true",
        "runtime.max_resumes=1000",
        "policies.main.engine.kind=embedded",
        "policies.main.engine.count=2",
        "policies.main.engine.max_restarts=1000",
        "policies.main.publish.transport.kind=broadcast",
        'policies.main.trainer.optimizer={kind = "adamw", learning_rate = 1e-3, second_beta = 0.999}',
        "policies.main.algorithm.aggregation=episode",
        "rollout.workers=2",
        "rollout.max_attempts=1000",
        "buffer={group_size = 8, groups_per_step = 2, max_staleness = 2, stall_s = 600.0}",
    )


def _kind_of(log: str) -> Victim | None:
    kinds = [victim for victim, begin in _LOGS.items() if log.startswith(begin)]
    return max(kinds, key=lambda kind: len(_LOGS[kind]), default=None)


def _log_of(pid: int) -> Path:
    with contextlib.suppress(OSError):
        return Path(os.readlink(f"/proc/{pid}/fd/1"))
    return Path()


def _is_on(machine: VirtualMachine, pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink(f"/proc/{machine.pid}/ns/pid")
    return False


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
