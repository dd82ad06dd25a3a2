"""A real agent is trained: an unmodified program from PyPI, against a tiny model of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.orchestration.run_directory import read_episodes
from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model
from tests.agents.cases import MINI_SWE_AGENT, AgentCase, read_only_folders
from tests.integration import runs

pytestmark = pytest.mark.timeout(900)
STEPS, GROUPS, GROUP_SIZE = 2, 2, 2
CONTEXT_TOKENS = 131_072
# An agent takes seconds of a core to start, so few play. An engine reserves a whole context for each request.
FEW = (
    f"steps={STEPS}",
    f"buffer.groups_per_step={GROUPS}",
    f"buffer.group_size={GROUP_SIZE}",
    "buffer.max_staleness=0",
    "rollout.concurrency=4",
    'policies.main.engine={kind = "embedded", args = {max_running_requests = 4}}',
)
LONG = (
    "rollout.limits.max_turns=16",
    f"rollout.limits.max_context_tokens={CONTEXT_TOKENS}",
    "rollout.limits.max_reply_tokens=150",
    "rollout.limits.tool_s=120",
)
# What the agent prints is rewarded by its checksum.
DESK = ("environment.name=tests.integration.program_environment:definition", "environment.options.is_coin=true")


def played_by(case: AgentCase) -> tuple[str, ...]:
    """The scaffold that plays an agent, as a recipe's overrides."""
    shown = json.dumps([str(path) for path in read_only_folders()])
    return (
        "scaffold.name=program",
        f"scaffold.options.command={json.dumps(case.command)}",
        *(f"scaffold.options.environment.{name}={json.dumps(value)}" for name, value in case.variables.items()),
        f"sandbox.options={{read_only = {shown}}}",
    )


def test_an_unmodified_agent_is_trained_and_its_first_step_passes_the_gate(tmp_path: Path) -> None:
    shape = TINY_SHAPE.model_copy(update={"context_tokens": CONTEXT_TOKENS})
    model = make_tiny_model(tmp_path / "model", shape=shape)
    result = runs.agentrl(*runs.train_arguments(tmp_path, model, *DESK, *LONG, *FEW, *played_by(MINI_SWE_AGENT)))
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "runs" / "test-seed0"
    trained = [line for line in runs.assert_whole(run) if line["outcome"] == "trained"]
    runs.assert_trained(run, STEPS * GROUPS * GROUP_SIZE)
    steps = [row for row in runs.metrics(run) if "batch/trained_tokens" in row]
    assert steps[0]["trainer/fresh_tokens"] > 0, "the first step's gate had nothing to compare"
    assert min(row["trainer/optimizer_steps"] for row in steps) > 0, "a step had nothing to learn"
    assert sum(row["batch/trained_tokens"] for row in steps) == sum(line["sampled_tokens"] for line in trained)
    prompts = [episode.nodes[0].token_ids for episode in read_episodes(run / "episodes" / "train.jsonl")]
    assert min(map(len, prompts)) > 1000, "no prompt of the agent's own was trained on"
