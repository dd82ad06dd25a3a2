"""A run whose newest checkpoint a disk has damaged goes on from it all the same: it is made again, to the bit."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.orchestration.assembly import StartPoint
from agentrl.orchestration.checkpoint_repair import CheckpointRepair
from agentrl.orchestration.recorder import SilentObserver
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.orchestration.run_journal import RunJournal
from agentrl.types.errors import StorageError
from tests.integration import runs
from tests.storms import partners

pytestmark = pytest.mark.long
SHORT = (runs.ENDLESS, "rollout.limits.max_reply_tokens=40", "checkpoint.interval_steps=2")
LORA = ("policies.main.trainer.lora={rank = 4}", 'policies.main.publish.transport={kind = "adapter"}')
QUIET = ("evaluation.interval_steps=0", "evaluation.final_tasks=0", "buffer.groups_per_step=2")


def stop_behind(process, run: Path, steps: Callable[[], int]) -> None:
    """Let a run go on to its third step, and stop it: it then saves where it is."""
    runs.wait_until(lambda: steps() >= 3, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(200) == runs.STOPPED
    assert runs.processes_are_gone(run, within_s=60.0)


@pytest.fixture(scope="module")
def stopped(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    # Of replies so short most are cut: rewarded alike, they would train nothing, and that comes out the same always.
    return stopped_run(folder, tiny_model, "environment.options.rewards_cut=true")


def stopped_run(folder: Path, model: Path, *overrides: str) -> Path:
    process = runs.start(folder, model, *SHORT, *overrides)
    run = folder / "runs" / "test-seed0"
    stop_behind(process, run, lambda: max((row["step"] for row in runs.metrics(run)), default=0))
    return run


def copied(run: Path, folder: Path, further_steps: int = 1) -> Path:
    """A copy of a run that is to make some more steps."""
    copy = shutil.copytree(run, folder / "run")
    steps = max(int(path.name) for path in copy.glob("checkpoints/*/[0-9]*"))
    runs.end_at(copy, steps + further_steps)
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(config.replace('"keep": 2', '"keep": 100'))  # policies go at paces of their own
    return copy


def newest(run: Path, policy: str = "main") -> Path:
    return max((run / "checkpoints" / policy).glob("[0-9]*"))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def check_goes_on(original: Path, run: Path, policy: str, damage: Callable[[Path], None], name: str) -> None:
    checkpoint = newest(run, policy)
    damage(checkpoint / name)
    resumed = runs.agentrl("resume", run)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    (said,) = [line for line in resumed.stderr.splitlines() if line.startswith(f"checkpoint {checkpoint} is damaged")]
    assert str(checkpoint / name) in said
    assert "it is made again from" in said
    assert "differ from" not in resumed.stderr
    assert files(checkpoint) == files(newest(original, policy)), "made again to the bit"
    counts = Counter(line["episode_id"] for line in runs.rows(run / "ledger.jsonl"))
    assert set(counts.values()) == {1}


@pytest.mark.parametrize(
    ("damage", "name"), [(flip, "model.safetensors"), (cut, "optimizer-0.pt"), (Path.unlink, "tokenizer.json")]
)
def test_a_damaged_checkpoint_is_made_again_to_the_bit_and_the_run_goes_on(
    stopped: Path, tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    run = copied(stopped, tmp_path)
    check_goes_on(stopped, run, "main", damage, name)
    steps = [row["step"] for row in runs.metrics(run) if "batch/trained_tokens" in row]
    assert steps == list(range(1, runs.version(run)["step"] + 1))


def test_a_damaged_checkpoint_of_adapters_is_made_again(tiny_model: Path, tmp_path: Path) -> None:
    original = stopped_run(tmp_path, tiny_model, *LORA)
    (tmp_path / "copy").mkdir()
    run = copied(original, tmp_path / "copy")
    check_goes_on(original, run, "main", flip, "adapter/adapter_model.safetensors")


def test_of_two_policies_the_damaged_checkpoint_alone_is_made_again(tiny_model: Path, tmp_path: Path) -> None:
    process = partners.start("signals.toml", tiny_model, tiny_model, tmp_path, *QUIET, *SHORT)
    original = tmp_path / "runs" / "signals-seed0"
    stop_behind(process, original, lambda: min(map(len, partners.steps_on_record(original).values())))
    run = copied(original, tmp_path, further_steps=2)
    before = files(newest(run, "speaker"))
    checkpoint = newest(run, "speaker")
    check_goes_on(original, run, "listener", flip, "model.safetensors")
    assert files(checkpoint) == before
    assert partners.twice_trained(run) == []


def test_weights_that_come_out_otherwise_are_of_a_new_epoch(stopped: Path, tmp_path: Path) -> None:
    run = copied(stopped, tmp_path)
    config = (run / "config.json").read_text().replace('"ranks": 1', '"ranks": 2')
    (run / "config.json").write_text(config)  # sums over two ranks round otherwise
    flip(newest(run) / "model.safetensors")
    resumed = runs.agentrl("resume", run)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "the weights of policy 'main' differ from the damaged ones: going on as 1." in resumed.stderr
    assert runs.version(run)["epoch"] == 1
    assert "config.json has changed since the run went on last" in resumed.stderr


def test_a_salvage_goes_on_from_the_checkpoint_before_and_no_step_has_metrics_twice(
    stopped: Path, tmp_path: Path
) -> None:
    run = copied(stopped, tmp_path)
    checkpoint = newest(run)
    flip(checkpoint / "optimizer-0.pt")
    resumed = runs.agentrl("resume", run, "--salvage")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    assert f"checkpoint {checkpoint} is damaged ({checkpoint / 'optimizer-0.pt'} has other bytes" in resumed.stderr
    assert aside.is_dir()
    steps = [row["step"] for row in runs.metrics(run) if "batch/trained_tokens" in row]
    assert steps == list(range(1, runs.version(run)["step"] + 1))
    counts = Counter(line["episode_id"] for line in runs.rows(run / "ledger.jsonl"))
    assert set(counts.values()) == {1}


async def test_a_damaged_checkpoint_that_cannot_be_made_again_is_named_with_the_remedy(
    stopped: Path, tmp_path: Path
) -> None:
    run = RunDirectory.open(copied(stopped, tmp_path))
    folder, progress = next(run.checkpoints())
    for path in run.journal.glob("*.journal"):
        path.unlink()
    for path in (run.path / "episodes").glob("*.parquet"):
        path.unlink()
    cut(folder / "optimizer-0.pt")
    start = StartPoint(dict(progress.versions), checkpoints={"main": folder})
    repair = CheckpointRepair(run.config(), run, RunJournal.none(), SilentObserver())
    with pytest.raises(
        StorageError,
        match=rf"checkpoint {folder} is damaged \({folder}/optimizer-0.pt has other bytes than were written\) and "
        r"cannot be made again .*what step \d+ trained is not on record.*`agentrl resume RUN --salvage`",
    ):
        await repair.run_all(start)
