"""Live sessions of whole runs: they stay where a run stops, and none is left where it has ended."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from agentrl.journal.reading import read_journal
from agentrl.testing.durable_environments import SessionServer
from tests.integration import runs

pytestmark = pytest.mark.long


@pytest.mark.parametrize("more_steps", [0, 2])
def test_a_run_that_stops_leaves_the_sessions_that_it_goes_on_in_and_one_that_ends_leaves_none(
    tiny_model: Path, tmp_path: Path, more_steps: int
) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    server = SessionServer(folder)
    overrides = (
        "environment.name=tests.integration.run_plugins:living_coin",
        "environment.placement=process",
        f'environment.options={{folder="{folder}"}}',
        "rollout.limits.max_reply_tokens=400",
        "buffer.max_staleness=100",
        "rollout.limits.tool_s=60",
    )
    process = runs.start(tmp_path, tiny_model, runs.ENDLESS, *overrides)
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_for_step(run, 1, process)
    runs.wait_for_requests(run)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == runs.STOPPED, output
    on_record = [history.session for history in read_journal(run / "journal").lives.values() if history.session]
    assert on_record, "with eight places some episode is always in flight"
    assert server.alive() == sorted(on_record)
    step = runs.version(run)["step"]
    runs.end_at(run, step + more_steps)
    resumed = runs.agentrl("resume", run)
    assert resumed.returncode == 0, resumed.stderr
    assert server.alive() == []
