"""Whole runs of which some members of each group go on from another's state, killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from agentrl.journal.reading import read_journal
from tests.integration import runs

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

COLUMNS = ["episode_id", "token_ids", "sampled", "turn", "logprobs", "versions"]
FORKS = ("buffer.group_size=5", "buffer.forks=3")
OF_COINS = (
    *FORKS,
    "environment.options.turns=3",
    "rollout.limits.max_turns=4",
    "rollout.limits.max_reply_tokens=200",
    "rollout.limits.max_context_tokens=1000",
    "rollout.limits.tool_s=60",
    "buffer.max_staleness=0",
    "seed=5",
)
OF_SQL = (
    *FORKS,
    "environment.name=sql",
    "rollout.limits.max_turns=6",
    "rollout.limits.max_reply_tokens=96",
    "rollout.limits.tool_s=60",
)


def kill_while_forks_play(process: subprocess.Popen[str], run: Path, within_s: float = 300.0) -> dict[str, Any]:
    """Kill a run once a step is done and a fork plays; returns what is on record of those that play, by name.

    The run stands still while its record is read: else the fork could end between the look and the kill.
    """
    runs.wait_for_step(run, 1, process)
    until = time.monotonic() + within_s
    while True:
        os.killpg(process.pid, signal.SIGSTOP)
        lives = read_journal(run / "journal").lives
        playing = {name: h for name, h in lives.items() if h.ticket.fork is not None and h.ended is None}
        if playing:
            break
        os.killpg(process.pid, signal.SIGCONT)
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert runs.processes_are_gone(run, within_s=60.0)
    return playing


def drawn_by(row: dict[str, Any]) -> list[tuple[int, float, int]]:
    """Token, log-probability and turn of all that a policy drew."""
    columns = zip(row["token_ids"], row["logprobs"], row["turn"], row["sampled"], strict=True)
    return [(token, logprob, turn) for token, logprob, turn, sampled in columns if sampled]


def behind(row: dict[str, Any], turn: int) -> list[int]:
    """All tokens of an episode through its reply of a turn."""
    places = zip(row["turn"], row["sampled"], strict=True)
    last = max(n for n, (of_turn, sampled) in enumerate(places) if sampled and of_turn <= turn)
    return row["token_ids"][: last + 1]


def assert_forked(run: Path, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every fork begins with its parent's tokens, which are trained in the parent alone; returns the forks' lines."""
    files = sorted((run / "episodes").glob("consumed-*.parquet"))
    rows = {row["episode_id"]: row for file in files for row in pq.read_table(file, columns=COLUMNS).to_pylist()}
    states: dict[int, set[str]] = defaultdict(set)
    forks = [line for line in lines if line["fork"]]
    for line in forks:
        states[line["group"]].add(line["fork"])
        parent, _, turn = line["fork"].partition("@")
        row, of_parent = rows[line["episode_id"]], rows[parent]
        assert parent.startswith(f"train-{line['group']:06d}-")
        if not row["token_ids"]:
            continue  # the end of the run came before a worker began it
        pinned = [token for token in drawn_by(row) if token[2] <= int(turn)]
        assert pinned == [token for token in drawn_by(of_parent) if token[2] <= int(turn)]
        assert behind(row, int(turn)) == behind(of_parent, int(turn))
        assert line["pinned_tokens"] == len(pinned)
        assert line["sampled_tokens"] == sum(row["sampled"]) - len(pinned)
        assert line["trained_tokens"] <= line["sampled_tokens"]
    assert all(len(of_group) == 1 for of_group in states.values()), "all forks of a group go on from one state"
    assert sum(line["outcome"] == "trained" and line["trained_tokens"] > 0 for line in forks) > 0
    return forks


def ends(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = ("reward", "fork", "sampled_tokens", "pinned_tokens", "trained_tokens")
    return {line["episode_id"]: tuple(line[name] for name in names) for line in lines}


def test_a_seeded_run_with_forks_is_bit_identical_across_kill_and_resume(engine_model: Path, tmp_path: Path) -> None:
    process = runs.start(tmp_path, engine_model, *OF_COINS, runs.ENDLESS)
    run = tmp_path / "runs" / "test-seed5"
    playing = kill_while_forks_play(process, run)
    steps = runs.last_step(run) + 3
    runs.end_at(run, steps)
    (tmp_path / "whole").mkdir()
    ended = runs.agentrl(*runs.train_arguments(tmp_path / "whole", engine_model, *OF_COINS, f"steps={steps}"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    whole = tmp_path / "whole" / "runs" / "test-seed5"
    resumed = runs.agentrl("resume", run)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    lines = runs.assert_whole(run)
    assert_forked(run, lines)
    assert ends(lines) == ends(runs.assert_whole(whole))
    assert runs.weights(run) == runs.weights(whole)
    by_name = {line["episode_id"]: line["fork"] for line in lines}
    assert {name: by_name[name] for name in playing} == {n: h.ticket.fork.name for n, h in playing.items()}
    steps = [row for row in runs.metrics(run) if "batch/trained_tokens" in row]
    trained = [line for line in lines if line["fork"] and line["outcome"] == "trained"]
    assert sum(row["buffer/forked_episodes"] for row in steps) == len(trained)
    assert sum(row["buffer/pinned_tokens"] for row in steps) == sum(line["pinned_tokens"] for line in trained)


@pytest.mark.parametrize("workers", [0, 2])
def test_forks_of_tool_calling_episodes_survive_a_kill(calling_model: Path, tmp_path: Path, workers: int) -> None:
    process = runs.start(tmp_path, calling_model, *OF_SQL, runs.ENDLESS, f"rollout.workers={workers}")
    run = tmp_path / "runs" / "test-seed0"
    playing = kill_while_forks_play(process, run)
    runs.end_at(run, runs.last_step(run) + 3)
    resumed = runs.agentrl("resume", run)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    lines = runs.assert_whole(run)
    forks = assert_forked(run, lines)
    assert playing.keys() <= {line["episode_id"] for line in forks}
    assert not [line for line in forks if line["reason"].startswith(("environment", "scaffold", "contract"))]
