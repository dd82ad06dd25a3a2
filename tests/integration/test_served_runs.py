"""Whole runs whose environment is on a server."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import runs

from tests.servers.environments import TOKEN, RunningServer, environment_server
from tests.storms.kill_runs import WORKER_SIGN

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
COIN = "tests.integration.run_plugins:coin"
VARIABLE = "SERVED_RUN_TOKEN"


def served(server: RunningServer) -> tuple[str, ...]:
    return (
        "environment.placement=remote",
        f'environment.servers=["{server.url}"]',
        f"environment.token_variable={VARIABLE}",
    )


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)


def test_a_seeded_run_is_bit_identical_inline_on_a_server_and_on_servers_of_its_own(
    tiny_model: Path, tmp_path: Path
) -> None:
    outcomes = []
    with environment_server(tmp_path / "server", COIN, "--workers", "2") as server:
        own = ("environment.placement=served", "environment.num_servers=2")
        for name, placed in (("inline", ()), ("served", served(server)), ("own", own)):
            folder = tmp_path / name
            folder.mkdir()
            overrides = ("buffer.max_staleness=0", "seed=5", "rollout.workers=1", *placed)
            ended = runs.agentrl(*runs.train_arguments(folder, tiny_model, *overrides))
            assert ended.returncode == 0, ended.stderr
            run = folder / "runs" / "test-seed5"
            ledger = runs.rows(run / "ledger.jsonl")
            ends = sorted((e["episode_id"], e["reward"], e["sampled_tokens"], e["step"]) for e in ledger)
            outcomes.append((runs.weights(run), ends, [row["trainer/loss"] for row in runs.metrics(run)]))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_a_run_on_a_server_goes_on_when_a_rollout_worker_dies(tiny_model: Path, tmp_path: Path) -> None:
    with environment_server(tmp_path / "server", COIN) as server:
        overrides = ("steps=8", "rollout.workers=2", "rollout.max_attempts=10", *served(server))
        process = runs.start(tmp_path, tiny_model, *overrides)
        run = tmp_path / "runs" / "test-seed0"
        runs.wait_for_step(run, 2, process)
        workers = [pid for pid in runs.processes_of(run) if WORKER_SIGN in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(workers[0], signal.SIGKILL)
        output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    rows = runs.metrics(run)
    assert rows[-1]["step"] == 8
    assert max(row["workers/restarts_total"] for row in rows) == 1
    ledger = runs.rows(run / "ledger.jsonl")
    assert set(Counter(line["episode_id"] for line in ledger).values()) == {1}
    assert [line for line in ledger if line["outcome"] == "dropped" and line["reason"].startswith("environment")] == []
