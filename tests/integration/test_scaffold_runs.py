"""Whole runs of tiny models under scaffolds that open branches or have several agents."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from agentrl.orchestration.run_directory import read_episodes
from agentrl.types.episode import Episode
from tests.integration import runs
from tests.storms.partners import trained_by

pytestmark = pytest.mark.long

STEPS, EPISODES_PER_STEP = 3, 8
# A random model ends a reply with one token of some three hundred.
LONG_REPLIES = (
    "environment.options.turns=2",
    "rollout.limits.max_turns=8",
    "rollout.limits.max_reply_tokens=900",
    "rollout.limits.max_context_tokens=4000",
    "rollout.limits.tool_s=60",
    "buffer.max_staleness=0",
)
COMPACTION = ("scaffold.name=compaction", "scaffold.options={compact_at_tokens = 40}")
HELPER = (
    "scaffold.name=multi_agent",
    'environment.agents={helper = "helper", actor = "main"}',
    "policies.helper.chat.renderer=qwen3",
    'policies.helper.trainer.optimizer={kind = "sgd", learning_rate = 0.05}',
)


def trained(folder: Path, model: Path, *overrides: str) -> Path:
    """The folder of a run that ended well, whose ledger and archive are whole."""
    result = runs.agentrl(*runs.train_arguments(folder, model, f"steps={STEPS}", *LONG_REPLIES, *overrides))
    assert result.returncode == 0, result.stdout + result.stderr
    run = folder / "runs" / "test-seed0"
    runs.assert_whole(run)
    return run


def steps_of(run: Path, prefix: str = "") -> list[dict[str, float]]:
    """A policy's steps, in the order in which they were made, each of which trainer and engine agreed on."""
    rows = [
        {name.removeprefix(prefix): value for name, value in row.items()}
        for row in runs.metrics(run)
        if f"{prefix}batch/trained_tokens" in row
    ]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["trainer/fresh_tokens"] > 0, "the first step's gate had nothing to compare"
    assert max(row["trainer/fresh_gap_max_nats"] for row in rows if row["trainer/fresh_tokens"]) < 1e-3
    assert min(row["trainer/optimizer_steps"] for row in rows) > 0, "a step had nothing to learn"
    return rows


def kept(run: Path) -> list[Episode]:
    episodes = read_episodes(run / "episodes" / "train.jsonl")
    assert episodes
    return episodes


def test_branches_of_compacted_episodes_are_trained_and_each_token_once(engine_model: Path, tmp_path: Path) -> None:
    run = trained(tmp_path, engine_model, *COMPACTION)
    steps = steps_of(run)
    branched = [episode for episode in kept(run) if sum(node.parent is None for node in episode.nodes) > 1]
    assert branched, "no episode was compacted"
    lines = [line for line in runs.rows(run / "ledger.jsonl") if line["outcome"] == "trained"]
    assert len(lines) == STEPS * EPISODES_PER_STEP
    drawn = sum(line["sampled_tokens"] for line in lines)
    assert sum(row["batch/trained_tokens"] for row in steps) == drawn, "some token is trained twice, or not at all"
    by_name = {line["episode_id"]: line for line in lines}
    for episode in branched:
        assert by_name[episode.episode_id]["sampled_tokens"] == sum(
            len(node.token_ids) for node in episode.nodes if node.sample is not None
        )


def test_both_policies_of_a_joint_game_are_trained(engine_model: Path, other_model: Path, tmp_path: Path) -> None:
    run = trained(tmp_path, engine_model, *HELPER, f"policies.helper.model={other_model}")
    assert trained_by(run) == {
        name: dict.fromkeys(range(1, STEPS + 1), EPISODES_PER_STEP) for name in ("main", "helper")
    }
    drawn = Counter[str]()
    for name in ("main", "helper"):
        drawn[name] = int(sum(row["batch/trained_tokens"] for row in steps_of(run, f"{name}/")))
    lines = [line for line in runs.rows(run / "ledger.jsonl") if line["outcome"] == "trained"]
    assert sum(line["sampled_tokens"] for line in lines) == drawn.total()
    assert min(drawn.values()) > 0
    assert any([turn.agent for turn in episode.turns][:3] == ["helper", "actor", "helper"] for episode in kept(run))
