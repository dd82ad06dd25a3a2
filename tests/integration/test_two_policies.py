from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration import runs
from tests.storms import partners
from tests.storms.kill_verdict import KillVerdict
from tests.storms.run_account import RunAccount, account_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
POLICIES = ("speaker", "listener")
STEPS = 12
QUIET = (f"steps={STEPS}", "evaluation.interval_steps=0", "evaluation.final_tasks=0", "checkpoint.interval_steps=3")
EPISODES_PER_STEP = 64


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("partners")
    made = {agent: partners.warm_start(folder / agent, agent) for agent in POLICIES}
    return {**made, "fluent": partners.warm_start(folder / "fluent", "listener", partners.FLUENT)}


def wait_until(holds: Callable[[], bool], process, within_s: float = 300.0) -> None:
    until = time.monotonic() + within_s
    while not holds():
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < until
        time.sleep(0.02)


def test_killed_in_the_middle_both_policies_go_on_and_nothing_is_lost_or_trained_twice(
    models: dict[str, Path], tmp_path: Path
) -> None:
    process = partners.start("signals.toml", models["speaker"], models["listener"], tmp_path, *QUIET)
    run = tmp_path / "runs" / "signals-seed0"
    wait_until(lambda: min(map(len, partners.steps_on_record(run).values())) >= 5, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert runs.processes_are_gone(run)
    verdict = KillVerdict(run, tmp_path / "no-tools.txt")
    verdict.look()
    assert partners.twice_trained(run) == []
    resumed = partners.resume(run)
    assert resumed.returncode == 0, resumed.stderr.decode()
    verdict.close()
    assert (verdict.turns_lost, verdict.effects_twice, verdict.regenerated, verdict.ledger_gaps) == (0, 0, 0, 0)
    assert partners.twice_trained(run) == []
    consecutive = list(range(1, STEPS + 1))
    assert partners.steps_on_record(run) == dict.fromkeys(POLICIES, consecutive)
    assert partners.trained_by(run) == {name: dict.fromkeys(consecutive, EPISODES_PER_STEP) for name in POLICIES}
    assert account_of(run, verdict.tokens, [], tmp_path) == RunAccount()


def test_a_frozen_opponent_gets_no_gradient_and_its_engine_serves_what_it_began_with(
    models: dict[str, Path], tmp_path: Path
) -> None:
    before = shutil.copytree(models["fluent"], tmp_path / "before")
    process = partners.start("frozen.toml", models["speaker"], models["fluent"], tmp_path, *QUIET)
    run = tmp_path / "runs" / "signals-frozen-seed0"
    wait_until(lambda: any(row["step"] >= 3 for row in runs.metrics(run)), process)
    trainers = [line for line in map(command_of, runs.processes_of(run)) if "agentrl.trainer.rank" in line]
    served = partners.engine_checksums(run, "listener", models["fluent"])
    assert process.wait() == 0
    expected = partners.file_checksums(before)
    assert served.keys() & expected.keys() == expected.keys()
    assert {name: served[name] for name in expected} == expected
    assert [line for line in trainers if str(models["fluent"]) in line] == []
    assert partners.weights_left(run, "listener") == []
    assert partners.largest_change(before, models["fluent"]) == 0.0
    assert partners.largest_change(models["speaker"], partners.weights_left(run, "speaker")[-1]) > 1e-3
    assert set(partners.trained_by(run)) == {"speaker"}


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
