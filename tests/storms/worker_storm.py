"""A real run of the SQL environment whose worker processes are killed at random while it goes on.

After each kill the run stands still for a moment, and its journal is held against all that earlier looks had on record.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.storms.escape_targets import running_with
from tests.storms.kill_runs import WORKER_SIGN, KilledRun
from tests.storms.kill_unprotected import VARIABLE
from tests.storms.sandbox_plugins import LINGER_S

NUM_WORKERS = 3
MOST_UNPROTECTED_KILLS = 60
COUNTING, IN_SANDBOX, FORGETFUL = "kill_plugins:counting", "sandbox_plugins:counting", "sandbox_plugins:forgetful"
_MEAN_DELAY_S = 1.0
_STARTING = 0.2
_DEADLINE_S = 600.0


def kill_workers(folder: Path, model: Path, num_kills: int, seed: int, environment: str = COUNTING) -> KilledRun:
    """One run whose workers are killed at random, finished at last."""
    run, rng = _run(folder, model, environment), random.Random(seed)
    with _working(run) as process:
        for number in range(num_kills):
            _kill_one(run, process, rng)
            _say(f"worker {number + 1} of {num_kills} killed: {run.verdict.num_turns} calls, {_faults(run)} faults")
        _wait_for_a_step(run, process)
    run.finish()
    return run


def found_without_tokens(folder: Path, model: Path, seed: int) -> int:
    """Kills that it takes to find a fault where fencing tokens do not rise; 0 if they did not find one."""
    os.environ[VARIABLE] = "one_token"
    return _kill_until_found(_run(folder, model, module="tests.storms.kill_unprotected"), seed)


def found_without_effect_ids(folder: Path, model: Path, seed: int) -> int:
    """The same where a sandbox does not know which of its commands were begun."""
    return _kill_until_found(_run(folder, model, FORGETFUL), seed)


def _kill_until_found(run: KilledRun, seed: int) -> int:
    rng = random.Random(seed)
    with _working(run) as process:
        for number in range(1, MOST_UNPROTECTED_KILLS + 1):
            _kill_one(run, process, rng)
            _say(f"without a protection, worker {number} killed: {_faults(run)} faults")
            if _faults(run):
                return number
    return 0


def metric(run: KilledRun, name: str) -> float:
    """What the first start of a run counted at its last step."""
    file = run.run / "metrics.jsonl"
    whole_lines = file.read_text().rpartition("\n")[0] if file.is_file() else ""
    rows = [json.loads(line) for line in whole_lines.splitlines()]
    return max((row.get(name, 0.0) for row in rows), default=0.0)


def _wait_for_a_step(run: KilledRun, process: subprocess.Popen[bytes]) -> None:
    """Until the run has made another, whose metrics count what was done to it until now."""
    began, until = time.time(), time.monotonic() + _DEADLINE_S
    while metric(run, "time") <= began:
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the run makes no step behind the last kill:\n{run.output()}")
        time.sleep(0.1)


def _run(folder: Path, model: Path, environment: str = COUNTING, module: str = "agentrl.cli.main") -> KilledRun:
    # What is killed from outside is no fault of an episode, which may lose any number of workers here.
    overrides = (
        f"rollout.workers={NUM_WORKERS}",
        "rollout.max_attempts=1000",
        f"environment.name=tests.storms.{environment}",
    )
    return KilledRun(folder, model, module, overrides, writer="worker-1")


@contextmanager
def _working(run: KilledRun) -> Iterator[subprocess.Popen[bytes]]:
    """The run, at work; killed at the end of the block."""
    process = run.start()
    try:
        run.wait_for_work(process, is_starting=False)
        yield process
    finally:
        run.end(process)


def _kill_one(run: KilledRun, process: subprocess.Popen[bytes], rng: random.Random) -> None:
    """Let the run work for a moment, kill a worker, and look at what is on record."""
    time.sleep(rng.expovariate(1 / _MEAN_DELAY_S))
    # Seldom one that is still starting: a place in which no worker comes up ends a run, as it should.
    may_be_starting = rng.random() < _STARTING
    until = time.monotonic() + _DEADLINE_S
    while not (workers := _workers(run, may_be_starting)) or not _acts(run):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the run has no workers:\n{run.output()}")
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(workers), signal.SIGKILL)
    # Some looks are at the moment of the kill, others when its episodes have gone on.
    time.sleep(rng.choice((0.0, 0.3)))
    with _halted(run):
        run.verdict.look()
    run.kills += 1


def _workers(run: KilledRun, may_be_starting: bool) -> list[int]:
    """Worker processes, or those of them that have a segment of the journal open: they have had an episode."""
    workers = [pid for pid, line in run.processes() if WORKER_SIGN in line]
    return [pid for pid in workers if may_be_starting or _writes(pid)]


def _acts(run: KilledRun) -> bool:
    """Whether a command runs in a sandbox, where there are any: kills are to hit calls that are under way."""
    return not any("sandbox_plugins" in override for override in run.overrides) or bool(running_with(str(LINGER_S)))


def _writes(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return any(os.readlink(link).endswith(".journal") for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


@contextmanager
def _halted(run: KilledRun) -> Iterator[None]:
    """All of the run stands still inside."""
    pids = [pid for pid, _ in run.processes()]
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _faults(run: KilledRun) -> int:
    return run.verdict.turns_lost + run.verdict.effects_twice + run.verdict.regenerated


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
