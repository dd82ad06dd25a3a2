"""Starts real runs of the counting SQL environment in processes of their own, and kills them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.process.crash_points import VARIABLE
from tests.storms.kill_verdict import KillVerdict
from tests.storms.run_account import SESSIONS_SUFFIX, RunAccount, account_of

RECIPE = """
name = "kills"
steps = 100000
[environment]
name = "tests.storms.kill_plugins:counting"
placement = "inline"
[policies.main.chat]
renderer = "qwen3"
[policies.main.trainer.optimizer]
kind = "sgd"
learning_rate = 0.01
[rollout]
concurrency = 16
max_consecutive_failures = 1000
[rollout.limits]
max_turns = 6
max_context_tokens = 512
max_reply_tokens = 96
[buffer]
group_size = 4
groups_per_step = 2
max_staleness = 2
stall_s = 120.0
[evaluation]
interval_steps = 0
final_tasks = 0
[checkpoint]
interval_steps = 3
"""
# A second policy acts in the same episodes, at another pace.
PARTNER = (
    "policies.partner.chat.renderer=qwen3",
    'policies.partner.trainer.optimizer={kind = "sgd", learning_rate = 0.01}',
    "policies.partner.buffer={group_size = 4, groups_per_step = 3, max_staleness = 2, stall_s = 120.0}",
    'environment.agents={first = "main", second = "partner"}',
    "scaffold.name=tests.storms.kill_plugins:Alternating",
    "rollout.workers=0",
)
WARMSTART = ("lessons=[{expert='expert',transcripts=1024,max_steps=120}]", "decay_steps=20")
# What command lines of a run's parts have in them.
_SIGNS = {"trainer": "agentrl.trainer.rank", "engine": "--weight-version", "archiver": "agentrl.journal.archiver"}
WORKER_SIGN = "agentrl.orchestration.worker_process"
_DEADLINE_S = 900.0
_MEAN_DELAY_S = 1.0


def warm_start(folder: Path) -> Path:
    """A model that calls tools as it should more often than not; a minute."""
    model = folder / "model"
    recipe = Path(__file__).parents[2] / "environments" / "sql" / "warmstart.toml"
    subprocess.run(
        [sys.executable, "-m", "agentrl.cli.main", "warmstart", str(recipe), f"output={model}", *WARMSTART],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return model


@dataclass(slots=True)
class KilledRun:
    """One run that is killed again and again, and the verdict on what it leaves.

    `module` is what is started instead of the command line, to take a protection away. `writer` is one whose journal
    shows that a start has come to work.
    """

    folder: Path
    model: Path
    module: str = "agentrl.cli.main"
    overrides: tuple[str, ...] = ()
    writer: str = "worker-0"
    kills: int = 0
    failures: list[str] = field(default_factory=list)
    verdict: KillVerdict = field(init=False)
    account: RunAccount = field(init=False)
    """What it has left, once it has finished."""
    _started: bool = False

    def __post_init__(self) -> None:
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.verdict = KillVerdict(self.run, self.folder / "count.txt")

    @property
    def temporary(self) -> Path:
        """Where all starts make their temporary files, and no other process."""
        return self.folder / "tmp"

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "runs" / "kills-seed0"

    def start(self, crash_at: str | None = None) -> subprocess.Popen[bytes]:
        """Start or resume the run, to be killed at a crash point if one is named."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        if crash_at is not None:
            environment[VARIABLE] = crash_at
        with (self.folder / "output.txt").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", self.module, *self._arguments()],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )

    def kill_at_random(self, rng: random.Random) -> None:
        """Let the run work for a moment, kill it or one of its parts, and look at what it left."""
        process = self.start()
        is_starting = rng.random() < 0.15
        self.wait_for_work(process, is_starting)
        time.sleep(rng.expovariate(1 / _MEAN_DELAY_S))
        victim = "driver" if is_starting else rng.choice(("driver", "driver", "driver", "driver", *_SIGNS))
        for pid in [] if victim == "driver" else self._parts(victim):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if victim != "driver":  # the run ends by itself or goes on; either way it is killed as a whole then
            time.sleep(rng.uniform(0.0, 0.5))
        self.end(process)

    def kill_at(self, point: str, count: int) -> bool:
        """Let the run kill itself at a crash point; False if it did not get there in time.

        Raises:
            RuntimeError: it ended otherwise.
        """
        if point.startswith("run."):
            self.bound_steps()
        process = self.start(f"{point}:{count}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_DEADLINE_S)
        status = process.poll()
        # Without its trainer or its archiver a run ends by itself.
        expected = 1 if point.startswith(("trainer.", "archive.")) else -signal.SIGKILL
        if status not in (None, expected):
            raise RuntimeError(f"the run ended with {status} before {point}:\n{self.output()}")
        self.end(process)
        return status is not None

    def finish(self) -> None:
        """Let the run take some more steps and end in order; every episode must be on its ledger then, and archived."""
        self.bound_steps()
        sessions = len(self._sessions())
        process = self.start()
        if process.wait(_DEADLINE_S) != 0:
            raise RuntimeError(f"the run did not finish:\n{self.output()}")
        self.wait_for_nobody()
        self.verdict.close()
        self.account = account_of(self.run, self.verdict.tokens, self._sessions()[sessions:], self.temporary)

    def bound_steps(self) -> int:
        """The next start is to come to the run's end, at the step that this gives."""
        config = self.run / "config.json"
        step = max((int(path.parent.name) for path in self.run.glob("checkpoints/*/*/progress.json")), default=0)
        config.write_text(re.sub(r'"steps": \d+', f'"steps": {step + 8}', config.read_text(), count=1))
        return step + 8

    def _sessions(self) -> list[str]:
        file = (self.folder / "count.txt").with_suffix(SESSIONS_SUFFIX)
        return file.read_text().splitlines() if file.is_file() else []

    def output(self) -> str:
        """The last that it said."""
        return (self.folder / "output.txt").read_text()[-3000:]

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the run as a whole and look at what it left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.wait_for_nobody()
        self.kills += 1
        if self.run.is_dir():
            self.verdict.look()

    def _arguments(self) -> list[str]:
        return ["resume", str(self.run)] if self.run.is_dir() else self.train_arguments()

    def train_arguments(self) -> list[str]:
        """What starts it, behind the program's name; writes its recipe."""
        recipe = self.folder / "recipe.toml"
        recipe.write_text(RECIPE)
        return [
            "train",
            str(recipe),
            f"policies.main.model={self.model}",
            f"runs_folder={self.folder / 'runs'}",
            f"environment.options.count_file={self.folder / 'count.txt'}",
            *self.overrides,
        ]

    def wait_for_work(self, process: subprocess.Popen[bytes], is_starting: bool) -> None:
        """Wait until this start writes its journal, or only until it has claimed it."""
        pattern = "claim-*.json" if is_starting else f"{self.writer}-*.journal"
        journal = self.run / "journal"
        before = {path.name for path in journal.glob(pattern)}
        until = time.monotonic() + _DEADLINE_S
        while {path.name for path in journal.glob(pattern)} <= before:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the run did not get to work:\n{self.output()}")
            time.sleep(0.02)

    def _parts(self, victim: str) -> list[int]:
        return [pid for pid, line in self.processes() if _SIGNS[victim] in line]

    def processes(self) -> list[tuple[int, str]]:
        """Processes whose command line or output names the run."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_text()
                if str(self.run) in line + os.readlink(entry / "fd" / "1"):
                    found.append((int(entry.name), line))
        return found

    def wait_for_nobody(self) -> None:
        """Waits for: the end of all its processes. Unblocked by: that, or a deadline, which raises RuntimeError."""
        until = time.monotonic() + _DEADLINE_S
        while self.processes():
            if time.monotonic() > until:
                raise RuntimeError(f"processes outlived their run: {self.processes()}")
            time.sleep(0.02)
