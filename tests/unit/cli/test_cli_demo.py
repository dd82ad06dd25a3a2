"""Parts of `agentrl demo --prm`, and all of it with a model of noise and a coin for a judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli import demo
from agentrl.cli.main import app
from agentrl.config.loading import load_table
from agentrl.orchestration.config import RunConfig, load_run_config
from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_run_config(demo.recipe(demo.PRM_RECIPE), [f"runs_folder={tmp_path / 'runs'}"])


def make_run(folder: Path, heldout: dict[int, float]) -> Path:
    folder.mkdir(parents=True)
    rows = [{"step": step, "eval/reward_mean": mean} for step, mean in heldout.items()]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_the_recipes_differ_in_scorer_and_credit_alone():
    plain, scored = (load_table(demo.recipe(file)) for file in (demo.OUTCOME_RECIPE, demo.PRM_RECIPE))
    assert [scorer["kind"] for scorer in scored["environment"].pop("scorers")] == ["verifier", "prm"]
    for table in (plain, scored):
        del table["name"], table["policies"]["main"]["algorithm"]
    assert scored == plain


def test_a_run_is_compared_with_the_one_of_its_seed(config, capsys):
    made = make_run(config.runs_folder / "sql-prm-seed3", {0: 0.25, 10: 0.5})
    make_run(config.runs_folder / "sql-demo-seed4", {0: 0.25, 10: 0.75})
    assert demo.compare(made, config, 3) == {}
    assert "`agentrl demo --seed 3` trains by the outcome alone" in capsys.readouterr().out
    assert not (made / "curve.png").exists()

    make_run(config.runs_folder / "sql-demo-seed3", {0: 0.25, 10: 0.625})
    assert demo.compare(made, config, 3) == {"outcome_success_after": 0.625}
    assert "0.625 at step 10" in capsys.readouterr().out
    assert (made / "curve.png").stat().st_size > 1000


@pytest.mark.long
def test_the_demo_fits_a_reward_model_whose_scores_stand_beside_the_turns_of_its_run(tmp_path, monkeypatch):
    shape = TINY_SHAPE.model_copy(update={"context_tokens": 2048})
    monkeypatch.setattr(demo, "warm_start", lambda seed, output, _: make_tiny_model(output, seed, shape))
    monkeypatch.setattr(demo, "_PRM_EPISODES", 16)
    overrides = [
        f"runs_folder={tmp_path / 'runs'}",
        "environment.name=tests.benchmarks.plugins:coin_sql",
        "steps=2",
        "buffer={group_size=2, groups_per_step=2, max_staleness=4, stall_s=600}",
        "rollout.concurrency=8",
        "rollout.limits={max_turns=2, max_context_tokens=2048, max_reply_tokens=16}",
        "evaluation={interval_steps=1, tasks=2, final_tasks=2}",
    ]
    played = CliRunner().invoke(app, ["demo", "--prm", "--models", str(tmp_path / "models"), *overrides])
    assert played.exit_code == 0, played.output
    assert [f"{phase}/3" in played.output for phase in (2, 3)] == [True] * 2
    assert "`agentrl demo --seed 0` trains by the outcome alone" in played.output
    figures = json.loads(played.stdout.splitlines()[-1])
    assert figures["steps"] == 2
    assert figures["prm_auc"] is None or 0 <= figures["prm_auc"] <= 1
    rows = (Path(figures["run"]) / "metrics.jsonl").read_text().splitlines()
    assert any("scorer/prm/value_mean" in row for row in rows)
    shown = CliRunner().invoke(app, ["show", figures["run"]])
    assert "[prm " in shown.output, shown.output
