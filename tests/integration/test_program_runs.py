"""Whole runs of tiny models that programs in sandboxes call by HTTP: trained, cut off, stopped, evaluated."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.integration import runs
from tests.storms.run_account import RunAccount, account_of

pytestmark = pytest.mark.long

STEPS, EPISODES_PER_STEP, CALLS = 3, 8, 2
# It asks twice and prints what it was told. Its wish for another temperature is in vain.
AGENT = """
import json, os, sys, urllib.request
messages = [{"role": "user", "content": sys.argv[1]}]
for number in range(2):
    body = json.dumps({"model": "main", "messages": messages, "temperature": 0.1}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    reply = json.load(urllib.request.urlopen(request, timeout=600))["choices"][0]["message"]
    messages += [reply, {"role": "user", "content": "go on"}]
    print(reply["content"])
"""
DESK = (
    "environment.name=tests.integration.program_environment:definition",
    "environment.options.is_coin=true",
    "rollout.limits.max_turns=4",
    "rollout.limits.max_reply_tokens=900",
    "rollout.limits.max_context_tokens=4000",
    "rollout.limits.tool_s=120",
)


def program(source: str = AGENT, **options: object) -> tuple[str, str]:
    """The scaffold that runs some Python, as a recipe's overrides."""
    made = {"command": ["python3", "-I", "-c", source, "{prompt}"], "timeout_s": 600.0, **options}
    fields = ", ".join(f"{name} = {json.dumps(value)}" for name, value in made.items())
    return "scaffold.name=program", f"scaffold.options={{{fields}}}"


def assert_whole(run: Path) -> list[dict[str, float]]:
    """The ledger of a run that has finished: each episode once, and in the archive as well."""
    assert runs.state(run)["status"] == "finished"
    lines = runs.rows(run / "ledger.jsonl")
    assert set(Counter(line["episode_id"] for line in lines).values()) == {1}
    assert account_of(run, {}, [], run / "no-sessions") == RunAccount()
    return lines


def test_a_black_box_program_is_trained(engine_model: Path, tmp_path: Path) -> None:
    overrides = (*DESK, *program(), f"steps={STEPS}", "buffer.max_staleness=0")
    result = runs.agentrl(*runs.train_arguments(tmp_path, engine_model, *overrides))
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "runs" / "test-seed0"
    trained = [line for line in assert_whole(run) if line["outcome"] == "trained"]
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
    assert runs.processes_are_gone(run, within_s=60.0)
