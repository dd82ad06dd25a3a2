from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from agentrl.orchestration.step_replay import StepReplay, replay_step
from tests.integration import runs

# Bounds so narrow that a few steps of a tiny model clip and reject tokens; checkpoints of steps 4 and 6 are kept.
OVERRIDES = (
    "steps=6",
    "policies.main.algorithm.loss.kind=ppo",
    "policies.main.algorithm.loss.proximal=behaviour",
    "policies.main.algorithm.loss.clip_low=0.01",
    "policies.main.algorithm.loss.clip_high=0.01",
    "policies.main.algorithm.correction.kind=icepop",
    "policies.main.algorithm.correction.low=0.96",
    "policies.main.algorithm.correction.high=1.04",
)


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replayed")
    result = runs.agentrl(*runs.train_arguments(folder, tiny_model, *OVERRIDES))
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "runs" / "test-seed0"


def recorded(run: Path, step: int) -> dict[str, float]:
    (row,) = (row for row in runs.metrics(run) if row["step"] == step and "trainer/loss" in row)
    return row


def assert_equals_the_record(replay: StepReplay, row: dict[str, float]) -> None:
    """Loss, gradient and weights are the run's, and so are the sums over statuses."""
    compared = {c.name: (c.recorded, c.replayed) for c in replay.comparisons}
    assert compared["trainer/loss"] == (row["trainer/loss"],) * 2
    assert compared["trainer/grad_norm"] == (row["trainer/grad_norm"],) * 2
    assert "weights" in compared
    assert replay.is_equal, compared
    counts = replay.count()
    computed = sum(counts[status] for status in ("kept", "clipped: low", "clipped: high", "rejected"))
    assert computed == row["trainer/computed_tokens"]
    assert counts["rejected"] == round(row["trainer/rejected_fraction"] * computed)
    assert computed + counts["skipped: no advantage"] == row["batch/trained_tokens"]
    sampled = sum(episode.episode.num_sampled_tokens for episode in replay.episodes)
    assert sum(counts.values()) - counts["prompt"] == sampled
    assert sum(counts.values()) == sum(episode.episode.num_tokens for episode in replay.episodes)
    assert counts["masked: stale"] == round(row["buffer/masked_fraction"] * sampled)


async def test_a_step_behind_a_checkpoint_is_the_recorded_one(run: Path) -> None:
    replay = await replay_step(run, 5)
    assert replay.plan.checkpoint == run / "checkpoints" / "main" / "000004"
    assert len(replay.plan.steps) == 1
    assert_equals_the_record(replay, recorded(run, 5))


async def test_a_step_between_checkpoints_is_the_recorded_one(run: Path) -> None:
    said: list[tuple[int, int, str]] = []
    replay = await replay_step(run, 6, on_progress=lambda *words: said.append(words))
    assert len(replay.plan.steps) == 2
    assert said[1:] == [(0, 2, "redoing step 5"), (1, 2, "replaying step 6"), (2, 2, "replayed step 6")]
    assert_equals_the_record(replay, recorded(run, 6))


@pytest.mark.long
def test_from_the_first_model_on_tokens_are_clipped_and_rejected_and_every_one_has_a_line(
    run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tokens.jsonl"
    result = runs.agentrl("replay", run, "3", "--json", file)
    assert result.returncode == 0, result.stderr
    assert "to the last bit" in result.stdout
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    statuses = Counter(row["status"] for row in rows)
    for status, count in statuses.items():
        lines = [[line[: len(status)], *line[len(status) :].split()[:1]] for line in result.stdout.splitlines()]
        assert [status, f"{count:,}"] in lines
    assert statuses["clipped: high"] + statuses["clipped: low"] > 0
    assert statuses["rejected"] > 0
    for row in (row for row in rows if row["weight"] is not None):
        assert (row["status"] == "rejected") == (not 0.96 <= row["ratio"] <= 1.04) == (row["weight"] == 0)
        if row["status"] == "clipped: high":
            assert (row["ratio"] > 1.01, row["advantage"] > 0) == (True, True)
        if row["status"] == "clipped: low":
            assert (row["ratio"] < 0.99, row["advantage"] < 0) == (True, True)
    assert all(row["staleness"] > 1 for row in rows if row["status"] == "masked: stale")


@pytest.mark.long
def test_an_episode_is_shown_token_by_token(run: Path) -> None:
    unknown = runs.agentrl("replay", run, "5", "--episode", "nobody")
    assert unknown.returncode == 1
    name = unknown.stderr.split("it knows ")[1].split(",")[0]
    shown = runs.agentrl("replay", run, "5", "--episode", name)
    assert shown.returncode == 0, shown.stderr
    assert "<|im_start|>user" in shown.stdout
    assert "log mu" in shown.stdout


@pytest.mark.long
async def test_a_step_of_several_optimizer_steps_is_the_recorded_one(tiny_model: Path, tmp_path: Path) -> None:
    options = {"loss.kind": "ppo", "loss.clip_low": 0.002, "loss.clip_high": 0.002, "minibatches": 2, "epochs": 2}
    overrides = (f"policies.main.algorithm.{name}={value}" for name, value in options.items())
    result = runs.agentrl(*runs.train_arguments(tmp_path, tiny_model, "steps=3", *overrides))
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "runs" / "test-seed0"
    replay = await replay_step(run, 3)
    row = recorded(run, 3)
    compared = {c.name: (c.recorded, c.replayed) for c in replay.comparisons}
    assert replay.is_equal, compared
    assert "weights" in compared
    assert compared["trainer/optimizer_steps"] == (row["trainer/optimizer_steps"],) * 2
    assert row["trainer/optimizer_steps"] + row["trainer/skipped_minibatches"] == 4
    assert row["trainer/clipped_fraction"] > 0
    counts = replay.count()
    last = sum(counts[status] for status in ("kept", "clipped: low", "clipped: high"))
    assert 2 * last == row["trainer/computed_tokens"], "each token in both epochs, and the status of the second"
    assert counts["clipped: low"] + counts["clipped: high"] > 0


def test_a_step_that_never_was_names_those_that_were(run: Path) -> None:
    result = runs.agentrl("replay", run, "9")
    assert result.returncode == 1
    assert "step 9 trained is not on record; steps that can be replayed: 1 to 6" in " ".join(result.stderr.split())
