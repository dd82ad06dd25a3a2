"""Whole runs beside the plain one: adapters, experts with replay, an engine of narrower precision."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from engine_server import EngineCalls, running_engine

from tests.integration import runs

pytestmark = pytest.mark.long

LORA = ("policies.main.trainer.lora={rank = 4}", 'policies.main.publish.transport={kind = "adapter"}')
REPLAYED = ("rollout.sampling.routed_experts=true", "policies.main.trainer.gap_report_interval_steps=1")
IN_TURN = ("buffer.max_staleness=0", "steps=4")
MASKED = ("rollout.sampling.top_k=20", "rollout.sampling.top_p=0.9")
DRAIN_S = 120
MEAN, MEAN_NO_REPLAY = "trainer/fresh_gap_mean_nats", "trainer/fresh_gap_mean_no_replay_nats"


def _attached(url: str) -> str:
    return f'policies.main.engine={{kind = "attached", urls = ["{url}"]}}'


def _brief(url: str) -> tuple[str, str]:
    """An attached engine that is asked for short replies: some take it long."""
    return _attached(url), "rollout.limits.max_reply_tokens=150"


def _trained(folder: Path, model: Path, *overrides: str) -> Path:
    """The folder of a run that ended well."""
    result = runs.agentrl(*runs.train_arguments(folder, model, *overrides))
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "runs" / "test-seed0"


def _fresh(run: Path) -> list[dict]:
    """Metrics of the steps that had tokens of the weights that they trained."""
    return [row for row in runs.metrics(run) if row.get("trainer/fresh_tokens")]


async def test_adapters_are_trained_published_and_taken_up_again(lora_engine: EngineCalls, tmp_path: Path) -> None:
    overrides = (*LORA, *_brief(lora_engine.server.url), "checkpoint.interval_steps=50000", "buffer.max_staleness=0")
    process = runs.start(tmp_path, lora_engine.server.model, runs.ENDLESS, *overrides)
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_for_step(run, 6, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == runs.STOPPED, process.communicate()[0]
    assert max(row["trainer/fresh_gap_max_nats"] for row in _fresh(run)) < 1e-3
    assert max(row["step"] for row in _fresh(run)) > 2, "no tokens of an adapter were trained on"
    step = runs.version(run)["step"]
    runs.end_at(run, step + 3)
    resumed = runs.agentrl("resume", run)
    assert resumed.returncode == 0, resumed.stderr
    assert runs.version(run) == {"epoch": 0, "step": step + 3}
    again = [row["trainer/fresh_gap_max_nats"] for row in _fresh(run) if row["step"] > step]
    assert again
    assert max(again) < 1e-3, "the engine serves other adapters than the trainer resumed"


async def test_steps_without_anything_to_learn_raise_the_version_and_interrupt_nobody(
    embedded: EngineCalls, tmp_path: Path
) -> None:
    run = _trained(
        tmp_path, embedded.server.model, *_brief(embedded.server.url), "environment.options.is_flat=true", "steps=5"
    )
    assert runs.version(run) == {"epoch": 0, "step": 5}
    steps = [row for row in runs.metrics(run) if "time/train_step_s" in row]
    assert [row["trainer/optimizer_steps"] for row in steps] == [0.0] * 5
    assert [row["trainer/loss"] for row in steps] == [0.0] * 5
    assert sum(row["rollout/aborted_generations"] for row in steps) == 0
    # The fifth episodes started once the third was told; of the last two the run may have ended before.
    assert (await embedded.http.get("/model_info")).json()["weight_version"] in ("0.3", "0.4", "0.5")
    assert max(row["buffer/staleness_max_steps"] for row in steps) <= 1, "tokens bear the version that they were told"
    # How many tokens are masked is a matter of speed: these steps take no time. But admission lets the last step's
    # episodes start only when the engine was told of the step before the last, so some of them are never too old.
    assert steps[-1]["batch/trained_tokens"] > 0, "the engine's tokens bear a version older than the one it was told"


async def test_a_run_without_a_bound_on_staleness_warns_and_masks_nothing(
    embedded: EngineCalls, tmp_path: Path
) -> None:
    # Eleven groups go by while the first one waits. Two of them make a step, so whether their steps come before the
    # first group or behind it, some tokens are three steps old.
    late = ("environment.options.first_waits_for=12", "rollout.limits.tool_s=300", "buffer.stall_s=300")
    overrides = (*_brief(embedded.server.url), "buffer.max_staleness=unbounded", "steps=8", *late)
    result = runs.agentrl(*runs.train_arguments(tmp_path, embedded.server.model, *overrides))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "'unbounded': tokens of any age are trained" in result.stderr
    steps = [row for row in runs.metrics(tmp_path / "runs" / "test-seed0") if "time/train_step_s" in row]
    assert len(steps) == 8
    assert [row["buffer/masked_fraction"] for row in steps] == [0.0] * 8
    assert max(row["buffer/staleness_max_steps"] for row in steps) > 1, "no token was older than the recipe's bound"


async def test_a_run_whose_engine_drains_cuts_no_reply_and_counts_those_that_it_waited_for(
    engine: EngineCalls, tmp_path: Path
) -> None:
    # Without a bound, episodes are started while the trainer is behind too: some run whenever weights are published.
    drains = (
        "policies.main.publish.pause_mode=drain",
        f"policies.main.publish.drain_s={DRAIN_S}",
        "buffer.max_staleness=unbounded",
    )
    run = _trained(tmp_path, engine.server.model, *_brief(engine.server.url), *drains, "steps=8")
    steps = [row for row in runs.metrics(run) if "time/train_step_s" in row]
    assert sum(row["rollout/aborted_generations"] for row in steps) == 0
    assert steps[-1]["publish/receipts_total"] > 2
    assert steps[-1]["publish/drained_requests_total"] > 0
    assert steps[-1]["publish/cut_requests_total"] == steps[-1]["requests/interrupted_total"] == 0
    assert 0 < steps[-1]["publish/drain_s_total"] < DRAIN_S * steps[-1]["publish/receipts_total"]
    assert max(row["trainer/fresh_gap_max_nats"] for row in _fresh(run)) < 1e-3


async def test_experts_and_kept_sets_are_replayed_and_the_gap_is_reported(
    moe_engine: EngineCalls, tmp_path: Path
) -> None:
    # With few tokens to draw from, nine replies of ten are cut: whole steps would have one reward and train nothing.
    kind = (*_brief(moe_engine.server.url), *REPLAYED, *MASKED, *IN_TURN, "environment.options.rewards_cut=true")
    run = _trained(tmp_path, moe_engine.server.model, *kind)
    assert len(_fresh(run)) == 4
    for row in _fresh(run):
        assert row["trainer/fresh_gap_max_nats"] < 1e-3
        assert row[MEAN_NO_REPLAY] > 100 * row[MEAN]


def test_an_attached_engine_with_other_weights_gets_those_of_the_run(
    engine_model: Path, other_model: Path, tmp_path: Path
) -> None:
    with running_engine(other_model, tmp_path / "engine.log") as url:
        run = _trained(tmp_path, engine_model, _attached(url), *IN_TURN)
    first = _fresh(run)[0]
    assert first["step"] == 1
    assert first["trainer/fresh_gap_max_nats"] < 1e-3


def test_adapters_are_not_put_on_an_attached_engine_of_another_model(
    engine_model: Path, other_model: Path, tmp_path: Path
) -> None:
    overrides = (*LORA, "policies.main.fleet.wait_s=1")
    with running_engine(other_model, tmp_path / "engine.log") as url:
        result = runs.agentrl(*runs.train_arguments(tmp_path, engine_model, *overrides, _attached(url)))
    assert result.returncode != 0
    assert "main-0: canary of version 0.0 failed: the canary's log-probabilities differ by" in result.stderr


def test_replay_narrows_the_gap_to_a_bfloat16_engine(moe_model: Path, tmp_path: Path) -> None:
    # Rounded, a nearly undecided router chooses another expert: how far off a token is then differs by machine.
    bounds = ("policies.main.trainer.max_gap_nats=0.5", "policies.main.publish.max_canary_gap_nats=3")
    with running_engine(moe_model, tmp_path / "engine.log", "--dtype", "bfloat16") as url:
        run = _trained(tmp_path, moe_model, _attached(url), *bounds, *REPLAYED, *IN_TURN)
    assert _fresh(run)
    for row in _fresh(run):
        assert 1e-5 < row[MEAN] < row[MEAN_NO_REPLAY]


def test_a_seeded_run_of_experts_in_turn_is_bit_identical_twice(moe_model: Path, tmp_path: Path) -> None:
    weights = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        run = _trained(tmp_path / name, moe_model, *REPLAYED, *IN_TURN)
        assert max(row["trainer/fresh_gap_max_nats"] for row in _fresh(run)) < 1e-3
        weights.append(runs.weights(run))
    assert weights[0] == weights[1]
