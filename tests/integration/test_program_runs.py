"""Whole runs of tiny models that programs in sandboxes call by HTTP: trained, cut off, stopped, evaluated."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.journal.reading import read_journal
from tests.integration import runs
from tests.storms.escape_targets import running_with

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

STEPS, EPISODES_PER_STEP, PLACES, CALLS = 3, 8, 8, 2
EVALUATED = ("evaluation.interval_steps=1", "evaluation.tasks=2", "evaluation.final_tasks=3")
# It asks twice and prints what it was told, waiting in between for a file. Its wish for another temperature is in vain.
AGENT = """
import json, os, sys, time, urllib.request
prompt, gate = sys.argv[1:3]
messages = [{"role": "user", "content": prompt}]
for number in range(2):
    body = json.dumps({"model": "main", "messages": messages, "temperature": 0.1}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    reply = json.load(urllib.request.urlopen(request, timeout=600))["choices"][0]["message"]
    messages += [reply, {"role": "user", "content": "go on"}]
    print(reply["content"])
    while number == 0 and not os.path.exists(gate):
        time.sleep(0.05)
"""
DESK = (
    "environment.name=tests.integration.program_environment:definition",
    "environment.options.is_coin=true",
    "rollout.limits.max_turns=4",
    "rollout.limits.max_reply_tokens=150",
    "rollout.limits.tool_s=120",
    f"rollout.concurrency={PLACES}",
)


def program(gate: Path) -> tuple[str, ...]:
    """The scaffold that runs the agent, as a recipe's overrides; its sandbox shows the gate's folder."""
    command = json.dumps(["python3", "-I", "-c", AGENT, "{prompt}", str(gate)])
    shown = f"sandbox.options={{read_only = [{json.dumps(str(gate.parent))}]}}"
    return "scaffold.name=program", f"scaffold.options={{command = {command}, timeout_s = 600.0}}", shown


@pytest.fixture
def gate() -> Iterator[Path]:
    """A file that lets agents go on once it is there, in a folder that every user can enter."""
    with tempfile.TemporaryDirectory(prefix="gate-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder) / "open"


def programs(gate: Path) -> int:
    """Agents that run in sandboxes: one process each, beside the shell that started it."""
    return sum(_command_of(pid).startswith("python3") for pid in running_with(str(gate)))


def _command_of(pid: int) -> str:
    """The name of a process's program; empty for one that has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def replied(run: Path) -> set[str]:
    """Episodes that have a reply on record."""
    with runs.halted(run):
        return {name for name, history in read_journal(run / "journal").lives.items() if history.turns}


def assert_dispatched_anew(lines: list[dict[str, Any]], cut_off: set[str]) -> None:
    """Each of the episodes that were cut off is dropped, with its tokens, and its task was played once more."""
    assert {line["episode_id"] for line in lines if line["reason"] == "scaffold_cut_off"} == cut_off
    assert all(line["sampled_tokens"] > 0 for line in lines if line["episode_id"] in cut_off)


def test_a_black_box_program_is_trained_and_evaluated(engine_model: Path, tmp_path: Path, gate: Path) -> None:
    gate.touch()
    overrides = (*DESK, *program(gate), *EVALUATED, f"steps={STEPS}", "buffer.max_staleness=0")
    result = runs.agentrl(*runs.train_arguments(tmp_path, engine_model, *overrides))
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "runs" / "test-seed0"
    trained = [line for line in runs.assert_whole(run) if line["outcome"] == "trained"]
    runs.assert_trained(run, STEPS * EPISODES_PER_STEP)
    steps = [row for row in runs.metrics(run) if "batch/trained_tokens" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert steps[0]["trainer/fresh_tokens"] > 0, "the first step's gate had nothing to compare"
    assert sum(row["batch/trained_tokens"] for row in steps) == sum(line["sampled_tokens"] for line in trained)
    counted = Counter[str]()
    for row in runs.metrics(run):
        counted.update({name: value for name, value in row.items() if name.startswith("program/")})
    episodes = len(trained)
    assert counted["program/programs"] == episodes
    assert counted["program/calls"] == counted["program/overrides_temperature"] == CALLS * episodes
    evaluations = [row for row in runs.metrics(run) if "eval/episodes" in row]
    played = [(row["eval/episodes"], row["eval/failed_episodes"], row["eval/turns_mean"]) for row in evaluations]
    assert played == [(3, 0, CALLS), *[(2, 0, CALLS)] * (STEPS - 1), (3, 0, CALLS)]
    assert runs.processes_are_gone(run, within_s=60.0)
    assert not running_with(str(gate))


def test_programs_of_a_worker_that_is_killed_are_dispatched_anew(
    engine_model: Path, tmp_path: Path, gate: Path
) -> None:
    process = runs.start(tmp_path, engine_model, *DESK, *program(gate), "rollout.workers=2")
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_until(lambda: programs(gate) == PLACES, process)
    runs.wait_until(lambda: len(replied(run)) == PLACES, process)
    before = replied(run)
    workers = [pid for pid in runs.processes_of(run) if "worker_process" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(min(workers), signal.SIGKILL)
    # The places of those that were cut off are taken by others, and none of the lost worker's programs runs on.
    runs.wait_until(lambda: len(replied(run)) == PLACES * 3 / 2 and programs(gate) == PLACES, process)
    gate.touch()
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    lines = runs.assert_whole(run)
    cut_off = {line["episode_id"] for line in lines if line["reason"] == "scaffold_cut_off"}
    assert len(cut_off) == PLACES / 2
    assert cut_off < before
    assert_dispatched_anew(lines, cut_off)
    assert runs.processes_are_gone(run, within_s=60.0)
    assert not running_with(str(gate))


def test_programs_of_a_run_that_stops_are_dispatched_anew_when_it_goes_on(
    engine_model: Path, tmp_path: Path, gate: Path
) -> None:
    process = runs.start(tmp_path, engine_model, *DESK, *program(gate))
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_until(lambda: programs(gate) == PLACES, process)
    runs.wait_until(lambda: len(replied(run)) == PLACES, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == runs.STOPPED, output
    assert f"parking {PLACES} episodes" in output
    assert "did not park in time" not in output, "programs that will not go on were waited for"
    assert runs.processes_are_gone(run, within_s=60.0)
    assert not running_with(str(gate))
    parked = read_journal(run / "journal").lives
    assert {len(history.turns) for history in parked.values()} == {1}
    gate.touch()
    resumed = runs.agentrl("resume", run)
    assert resumed.returncode == 0, resumed.stderr
    assert_dispatched_anew(runs.assert_whole(run), set(parked))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["environment.name=sql"], "runs a program in the environment's sandbox, and 'sql' has none"),
        (
            ["sandbox.kind=tests.integration.program_environment:unreachable"],
            'no gateway can be reached here; set sandbox.kind = "bwrap"',
        ),
        (["scaffold.options.command=my-agent"], "give its words as a list"),
    ],
    ids=["no sandbox", "no gateway", "no list"],
)
def test_a_run_whose_program_cannot_be_played_is_refused_and_leaves_no_folder(
    engine_model: Path, tmp_path: Path, gate: Path, overrides: list[str], said: str
) -> None:
    arguments = runs.train_arguments(tmp_path, engine_model, *DESK[:1], *program(gate)[:2], *overrides)
    result = runs.agentrl(*arguments)
    assert result.returncode == 1, result.stdout
    assert said in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs" / "test-seed0").exists()


def test_a_run_whose_program_is_not_in_its_sandboxes_ends_and_says_so(engine_model: Path, tmp_path: Path) -> None:
    missing = 'scaffold.options={command = ["no-such-agent", "{prompt}"]}'
    overrides = (*DESK, "scaffold.name=program", missing, "rollout.max_consecutive_failures=6")
    result = runs.agentrl(*runs.train_arguments(tmp_path, engine_model, *overrides))
    assert result.returncode == 1, result.stdout
    assert "no-such-agent: not found" in result.stderr
    assert "exit code 127" in result.stderr
    assert runs.processes_are_gone(tmp_path / "runs" / "test-seed0", within_s=60.0)
