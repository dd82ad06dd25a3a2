"""Starts real runs in processes of their own, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import httpx
import pyarrow.parquet as pq

from tests.storms.run_account import RunAccount, account_of

RECIPE = """
name = "test"
steps = 3
[environment]
name = "tests.integration.run_plugins:coin"
placement = "inline"
[policies.main.chat]
renderer = "qwen3"
[policies.main.trainer.optimizer]
kind = "sgd"
learning_rate = 0.05
[rollout]
concurrency = 8
[rollout.limits]
max_turns = 1
max_context_tokens = 512
max_reply_tokens = 300
tool_s = 60.0
[buffer]
group_size = 4
groups_per_step = 2
max_staleness = 1
stall_s = 240.0
[evaluation]
interval_steps = 0
final_tasks = 0
[checkpoint]
interval_steps = 2
"""
ENDLESS = "steps=100000"  # until it is ended, or resumed with an end
STOPPED = 130  # how a command ends whose run was stopped before its last step
_DEADLINE_S = 600


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "agentrl.cli.main", *map(str, arguments)]


def agentrl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=_DEADLINE_S, check=False)


def train_arguments(folder: Path, model: Path, *overrides: str) -> list[str]:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    return ["train", str(recipe), f"policies.main.model={model}", f"runs_folder={folder / 'runs'}", *overrides]


def start(folder: Path, model: Path, *overrides: str, output: int | IO[str] = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start a training run without waiting for it."""
    return subprocess.Popen(
        command(*train_arguments(folder, model, *overrides)),
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until a run's metrics hold a step."""
    until = time.monotonic() + _DEADLINE_S
    while time.monotonic() < until:
        if any(row["step"] >= step for row in metrics(run)):
            return
        if process.poll() is not None:
            raise AssertionError(f"the run ended early:\n{process.communicate()[0]}")
        time.sleep(0.05)
    raise AssertionError(f"no step {step} within {_DEADLINE_S} s")


def last_step(run: Path) -> int:
    """The newest step of a run's metrics."""
    return max(row["step"] for row in metrics(run))


def end_at(run: Path, step: int) -> None:
    """Have an endless run that does not go on just now end at a step once it is resumed."""
    config = (run / "config.json").read_text()
    assert '"steps": 100000' in config
    (run / "config.json").write_text(config.replace('"steps": 100000', f'"steps": {step}'))


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[Any], within_s: float = _DEADLINE_S) -> None:
    """Wait until something holds, as long as a run goes on."""
    until = time.monotonic() + within_s
    while not holds():
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < until
        time.sleep(0.05)


def rows(file: Path) -> list[dict[str, Any]]:
    """Objects of a file of JSON lines, without the checksum of each; the last line may be under way still."""
    text = file.read_text() if file.is_file() else ""
    found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [{name: value for name, value in row.items() if name != "checksum"} for row in found]


def assert_whole(run: Path) -> list[dict[str, Any]]:
    """The ledger of a run that has finished: each episode once, and in the archive as well."""
    assert state(run)["status"] == "finished"
    lines = rows(run / "ledger.jsonl")
    assert set(Counter(line["episode_id"] for line in lines).values()) == {1}
    assert account_of(run, {}, [], run / "no-sessions") == RunAccount()
    return lines


def assert_archived_as_in_ledger(run: Path) -> None:
    """What was consumed is in Parquet files that say what the ledger says, as any tool reads both."""
    names = ["episode_id", "outcome", "reason", "step", "reward", "turns", "sampled_tokens"]
    files = sorted((run / "episodes").glob("consumed-*.parquet"))
    found = [row for file in files for row in pq.read_table(file, columns=names).to_pylist()]
    assert len({row["episode_id"] for row in found}) == len(found), "an episode was archived twice"
    lines = [{**line, "reason": line["reason"] or None} for line in rows(run / "ledger.jsonl")]
    expected = {line["episode_id"]: {name: line[name] for name in names} for line in lines}
    assert {row["episode_id"]: row for row in found} == expected


def assert_trained(run: Path, num_episodes: int) -> None:
    """A run has finished in order: so many episodes trained, engine and trainer agreed, and some were right."""
    assert state(run)["status"] == "finished"
    assert sum(line["outcome"] == "trained" for line in rows(run / "ledger.jsonl")) == num_episodes
    gaps = [row["trainer/fresh_gap_max_nats"] for row in metrics(run) if row.get("trainer/fresh_tokens")]
    assert gaps
    assert max(gaps) < 1e-3
    means = {row["batch/reward_mean"] for row in metrics(run) if "batch/reward_mean" in row}
    assert max(means) > 0.0, "no step had a right episode"


def metrics(run: Path) -> list[dict[str, Any]]:
    return rows(run / "metrics.jsonl")


def state(run: Path) -> dict[str, Any]:
    return json.loads((run / "state.json").read_text())


def version(run: Path) -> dict[str, Any]:
    """Epoch and step of the only policy."""
    return state(run)["versions"]["main"]


def weights(run: Path) -> bytes:
    """The only policy's newest checkpoint."""
    newest = max((run / "checkpoints" / "main").iterdir())
    return (newest / "model.safetensors").read_bytes()


def processes_of(run: Path) -> list[int]:
    """Processes whose command line or output names the run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and any(str(run) in text for text in _traces(entry)):
            found.append(int(entry.name))
    return found


def engine_of(run: Path) -> int:
    """The process of a run's engine."""
    return next(pid for pid in sorted(processes_of(run)) if "--weight-version" in _traces(Path(f"/proc/{pid}"))[0])


def wait_for_requests(run: Path, count: int = 2, within_s: float = 60.0) -> None:
    """Until a run's engine draws tokens for so many: it rests while the trainer is behind."""
    arguments = Path(f"/proc/{engine_of(run)}/cmdline").read_text().split("\0")
    url = f"http://127.0.0.1:{arguments[arguments.index('--port') + 1]}/model_info"
    until = time.monotonic() + within_s
    while httpx.get(url, trust_env=False, timeout=60.0).json()["num_running"] < count:
        assert time.monotonic() < until
        time.sleep(0.002)


@contextmanager
def halted(run: Path) -> Iterator[None]:
    """All processes of a run stand still inside, so that nothing is written while its folder is changed."""
    processes = processes_of(run)
    for pid in processes:
        with suppress(ProcessLookupError):  # it has ended since it was listed
            os.kill(pid, signal.SIGSTOP)
    yield
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def processes_are_gone(run: Path, within_s: float = 10.0) -> bool:
    """Whether all processes of a run end in time."""
    until = time.monotonic() + within_s
    while processes_of(run) and time.monotonic() < until:
        time.sleep(0.05)
    return not processes_of(run)


def _traces(entry: Path) -> list[str]:
    try:
        return [(entry / "cmdline").read_text(), os.readlink(entry / "fd" / "1")]
    except OSError:
        return ["", ""]
