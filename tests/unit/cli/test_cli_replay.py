"""What `agentrl replay` shows of a replay that is made by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from agentrl.buffer.staleness import train_view
from agentrl.cli.main import app
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.replay_plan import ReplayPlan
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.orchestration.step_replay import Comparison, StepReplay
from agentrl.orchestration.token_status import ExplainedEpisode, dropped_branches, explained_branch
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.tokens.tokenizer import FastTokenizer
from agentrl.types.explanation import TokenStatus, TokenTerms
from agentrl.types.version import PolicyVersion

V2 = PolicyVersion(0, 2)
LOSS = Comparison("trainer/loss", 0.25, 0.25)


def episodes() -> tuple[ExplainedEpisode, ...]:
    """One with a kept, a clipped and two stale tokens behind a prompt of three, and one that failed."""
    episode = build_episode(build_ticket("train-000000-0"), [(2, 0), (2, 2)], reward=1.0)
    (view,) = train_view(episode, "main", V2, max_staleness=1)
    of_tokens = [-0.25, -0.125], [1.28, 1.5], [0.75, 2.0], [1.0, 1.0], [0.5, 0.5]
    terms = TokenTerms(*(np.array(v, np.float32) for v in of_tokens), (TokenStatus.KEPT, TokenStatus.CLIPPED_HIGH))
    branch = explained_branch(view, terms, np.full(len(view.loss_mask), 0.5, np.float32))
    failed = build_episode(build_ticket("train-000000-1", member=1), [(4, 0)], reward=None)
    dropped = dropped_branches(failed, "main", V2, 1, "environment_died")
    return (
        ExplainedEpisode(episode, 0, {"agent": 1.0}, {"agent": 0.5}, (branch,)),
        ExplainedEpisode(failed, 0, {}, {}, dropped),
    )


def replay_of(
    *comparisons: Comparison, differences: tuple[str, ...] = (), of: tuple[ExplainedEpisode, ...] | None = None
) -> StepReplay:
    return StepReplay(ReplayPlan("main", 3, V2, None, ()), of or episodes(), comparisons, differences)


def joined(lines: list[list[str]]) -> str:
    return " ".join(word for line in lines for word in line)


@pytest.fixture
def algorithm() -> dict[str, Any]:
    return {}


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, algorithm: dict[str, Any]) -> Path:
    table = {
        "name": "demo",
        "steps": 5,
        "runs_folder": tmp_path,
        "policies": {"main": {"model": tiny_model, "algorithm": algorithm}},
        "environment": {"name": "sql"},
    }
    return RunDirectory.create(RunConfig.model_validate(table)).path


@pytest.fixture
def show(run: Path, monkeypatch: pytest.MonkeyPatch):
    """Shows a replay as the command does; returns the words of each line."""

    def shown(replay: StepReplay, *options: str) -> list[list[str]]:
        async def replay_step(*_arguments) -> StepReplay:
            return replay

        monkeypatch.setattr("agentrl.orchestration.step_replay.replay_step", replay_step)
        result = CliRunner().invoke(app, ["replay", str(run), "3", *options])
        assert result.exit_code == 0, result.output
        return [line.split() for line in result.output.splitlines()]

    return shown


def test_statuses_add_up_over_all_episodes(show):
    lines = show(replay_of(LOSS))
    # Prompts of 3, a context of 2, and 4 sampled tokens in each episode.
    assert [line[:-1] for line in lines if line[:1] in (["prompt"], ["dropped:"])] == [
        ["prompt", "8", "0.5000"],
        ["dropped:", "environment_died", "4", "0.2500"],
    ]
    assert ["all", "16", "1.0000"] in lines
    first, second = (line for line in lines if line[:1] in (["train-000000-0"], ["train-000000-1"]))
    assert first[1:] == ["1.000", "+0.500", "4", "0.500", "0.250", "0.250"]
    assert second[1:] == ["4", "1.000"], "it has neither reward nor advantage"


def test_the_rules_that_decided_are_named(show):
    rules = joined(show(replay_of(LOSS)))
    assert "loss ppo clip_low=0.2 clip_high=0.28 proximal=recomputed" in rules
    assert "max_staleness=4" in rules
    assert "credit" not in rules


@pytest.mark.parametrize(
    "algorithm", [{"advantage": "leave_one_out", "credit": {"kind": "turn_leave_one_out", "gamma": 0.5}}]
)
def test_a_rule_of_credit_is_named_too(show):
    assert "credit turn_leave_one_out gamma=0.5 scorer=; loss" in joined(show(replay_of(LOSS)))


def test_values_that_are_equal_are_said_to_be(show):
    text = [" ".join(line) for line in show(replay_of(LOSS, Comparison("trainer/tokens", 5.0, 5.0)))]
    assert "trainer/loss 0.25 0.25 equal" in text
    assert "all 2 values equal those that the run recorded, to the last bit" in text


def test_every_value_that_differs_is_shown_with_what_may_be_the_reason(show):
    other = Comparison("trainer/kl_k3_nats", 0.5, 0.5000001)
    replay = replay_of(LOSS, other, differences=("the run trained on 2 ranks, the replay on one",))
    text = [" ".join(line) for line in show(replay)]
    assert "trainer/kl_k3_nats 0.5 0.5000001 differs by 1.0e-07" in text
    assert "not all values equal those that the run recorded: the run trained on 2 ranks, the replay on one" in text


def test_a_step_without_a_record_is_not_said_to_be_equal(show):
    text = joined(show(replay_of()))
    assert "recorded nothing to compare" in text
    assert "to the last bit" not in text


def test_an_episode_has_a_row_for_every_sampled_token(show):
    lines = show(replay_of(LOSS), "--episode", "train-000000-0")
    assert ["reward", "1.0;", "advantage", "+0.5000"] in lines
    table = lines[next(n for n, line in enumerate(lines) if line[:2] == ["branch", "position"]) + 1 :]
    ends = [(line[1], line[-1]) for line in table if line]
    assert ends == [("3", "stale"), ("4", "stale"), ("7", "kept"), ("8", "high")]
    assert table[2][-8:] == ["0", "-0.5000", "-0.2500", "1.2800", "0.7500", "0.5000", "1.0000", "kept"]


def test_rewards_and_advantages_of_several_agents_are_those_of_each(show):
    alone, _ = episodes()
    both = dataclasses.replace(alone, rewards={"white": 1.0, "black": 0.0}, advantages={"white": 0.5, "black": -0.25})
    table = joined(show(replay_of(LOSS, of=(both,))))
    assert "train-000000-0 white 1.000, black 0.000 white +0.500, black -0.250 4" in table
    episode = joined(show(replay_of(LOSS, of=(both,)), "--episode", "train-000000-0"))
    assert "reward white 1.0, black 0.0; advantage white +0.5000, black -0.2500" in episode


def test_text_of_tokens_is_never_read_as_markup(show, monkeypatch):
    monkeypatch.setattr(FastTokenizer, "decode", lambda _self, ids: "[/bold]" if isinstance(ids, int) else "[red]")
    text = joined(show(replay_of(LOSS), "--episode", "train-000000-0"))
    assert text.count("[/bold]") == 4
    assert "[red]" in text


def test_every_token_has_a_line_of_json(show, tmp_path):
    file = tmp_path / "tokens.jsonl"
    show(replay_of(LOSS), "--json", str(file))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["status"] for row in rows if row["episode"] == "train-000000-1"] == [
        *["prompt"] * 3,
        *["dropped: environment_died"] * 4,
    ]
    assert len(rows) == 16
