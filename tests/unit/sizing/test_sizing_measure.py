"""What is measured in run folders that are written by hand, so that each figure is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl import codec
from agentrl.buffer.ledger import LedgerLine
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.sizing.config import rough_latencies
from agentrl.sizing.latencies import ROUGH
from agentrl.sizing.measure import measure
from agentrl.telemetry.json_lines import JsonLines
from agentrl.telemetry.span_files import SpanFile
from agentrl.telemetry.spans import Span, SpanKind
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.types.errors import ConfigError

# Of two turns of 10 tokens: 0.05 s a token, 0.2 s of tools, and 0.3 s beside.
REPLIES, TOKEN_S, TOOL_S, START_S = [(10, 0), (10, 0)], 0.05, 0.1, 0.3
ROW = {
    "time/step_s": 4.0, "time/wait_for_batch_s": 1.0, "time/train_step_s": 2.5, "time/publish_s": 0.75,
    "publish/gap_max_s": 0.0, "rollout/episodes": 8.0, "rollout/sampled_tokens_mean": 20.0, "batch/episodes": 8.0,
    "trainer/tokens_per_s": 80.0, "buffer/ready_episodes": 0.0,
}  # fmt: skip


def write_run(
    folder: Path,
    steps: int,
    rows: list[dict[str, float]] | None = None,
    buffer: dict[str, int] | None = None,
    **rollout: Any,
) -> Path:
    table = {
        "name": "run", "steps": 99, "runs_folder": folder, "policies": {"main": {"model": "model"}},
        "environment": {"name": "fake", "placement": "inline"}, "rollout": rollout,
        "buffer": {"group_size": 2, "groups_per_step": 4, **(buffer or {})},
    }  # fmt: skip
    run = RunDirectory.create(RunConfig.model_validate(table))
    metrics, ledger, kept = (JsonLines(path) for path in (run.metrics, run.ledger, run.episodes / "train.jsonl"))
    for step, row in enumerate(rows or [ROW] * steps, start=1):
        metrics.append(codec.to_json({"step": step, "time": 0.0, **row}).decode())
    for group in range(4):
        for member in range(2):
            episode = build_episode(build_ticket(f"e-{group}-{member}", group, member), REPLIES)
            turns = [replace(turn, generation_s=10 * TOKEN_S, environment_s=TOOL_S) for turn in episode.turns]
            seconds = 2 * (10 * TOKEN_S + TOOL_S) + START_S
            kept.append(codec.to_json(replace(episode, turns=tuple(turns), seconds=seconds)).decode())
            ledger.append(codec.to_json(line(group, member, seconds)).decode())
    for file in (metrics, ledger, kept):
        file.close()
    return run.path


def line(group: int, member: int, seconds: float) -> LedgerLine:
    is_dropped = group == 3
    return LedgerLine(
        episode_id=f"e-{group}-{member}", task="fake/train/0", group=group, member=member, attempt=0,
        outcome="dropped" if is_dropped else "trained", reason="no_spread" if is_dropped else "", stop="answered",
        reward=1.0, turns=2, sampled_tokens=20, trained_tokens=0 if is_dropped else 20, masked_tokens=0,
        seconds=seconds, tool_s=2 * TOOL_S, step=1, environment="fake",
    )  # fmt: skip


def test_one_run_tells_all_parts_but_how_its_engines_slow_down(tmp_path: Path):
    found = measure([write_run(tmp_path, 5)], None, rough_latencies())
    # 8 episodes of 20 tokens in 4 s, each token 0.05 s: two sequences at once.
    assert found.decode.points[-1] == pytest.approx((2.0, 40.0))
    assert ROUGH in found.decode.source
    assert found.environment_start_s.value == pytest.approx(START_S)
    assert found.stage_s.value == pytest.approx(0.5)
    assert found.publish_s.value == pytest.approx(0.75)
    assert found.dropped_groups.value == pytest.approx(0.25)
    shape = found.shapes.episodes[0]
    assert (shape.reply_tokens, shape.prompt_tokens) == ((10.0, 10.0), (3.0, 2.0))
    assert shape.environment_s == pytest.approx((TOOL_S, TOOL_S))
    # 200 tokens a step of 8 episodes of 25: 2.5 s for these 200, and nothing tells what of it is fixed.
    assert (found.trainer_fixed_s.value, found.trainer_token_s.value) == pytest.approx((0.0, 2.5 / 200))


def test_publications_that_interrupt_more_tell_what_a_sequence_costs(tmp_path: Path):
    # 0.1 s, and 0.02 s for each of 5 to 20 sequences.
    rows = [{**ROW, "time/publish_s": 0.1 + 0.02 * n, "rollout/aborted_generations": float(n)} for n in (5, 10, 15, 20)]
    found = measure([write_run(tmp_path, 0, [ROW, *rows, *rows])], None, rough_latencies())
    assert (found.publish_s.value, found.interrupt_s.value) == pytest.approx((0.1, 0.02))


def test_in_a_run_in_turn_engines_rest_while_the_trainer_steps(tmp_path: Path):
    # 8 episodes of 20 tokens in the second in which the trainer waits for them, each token 0.05 s.
    found = measure([write_run(tmp_path, 5, buffer={"max_staleness": 0})], None, rough_latencies())
    assert found.decode.points[-1] == pytest.approx((8.0, 160.0))


def write_spans(folder: Path, *replies: tuple[str, float, float], process: str = "run") -> None:
    """Replies of episodes by trace, start and end in seconds."""
    file = SpanFile(folder / "traces", process)
    for trace, start_s, end_s in replies:
        file.write(Span(SpanKind.GENERATION, "generation", 100 + start_s, 100 + end_s, trace, "0" * 16))
    file.close()


def test_spans_tell_how_many_sequences_share_an_engine_while_it_works(tmp_path: Path):
    """One alone for a second, two for another, then nothing for eight: (1 * 1 + 2 * 2) / 3 while replies were made."""
    run = write_run(tmp_path, 5)
    write_spans(run, ("train-0-0", 0, 2), ("train-0-1", 1, 2), ("heldout-0-0", 0, 9), ("train-0-2", 10, 11))
    found = measure([run], None, rough_latencies())
    assert found.decode.points[-1] == pytest.approx((5 / 3, 5 / 3 / TOKEN_S))


def test_spans_behind_the_start_of_the_last_traced_episode_do_not_count(tmp_path: Path):
    """Others may run beside it that nobody traced: two until its start at 2 s, and one that goes on for long."""
    run = write_run(tmp_path, 5)
    write_spans(run, ("train-0-0", 0, 100), ("train-0-1", 0, 2), ("train-0-2", 2, 2.5))
    assert measure([run], None, rough_latencies()).decode.points[-1] == pytest.approx((2.0, 2.0 / TOKEN_S))


def test_spans_of_a_run_that_was_started_twice_do_not_count(tmp_path: Path):
    run = write_run(tmp_path, 5)
    for _ in range(2):
        write_spans(run, ("train-0-0", 0, 2), ("train-0-1", 1, 9))
    assert measure([run], None, rough_latencies()).decode.points[-1] == pytest.approx((2.0, 40.0))


def test_a_second_run_tells_how_engines_slow_down(tmp_path: Path):
    busier = {**ROW, "rollout/episodes": 16.0}
    runs = [write_run(tmp_path, 5), write_run(tmp_path, 5, [busier] * 5)]
    found = measure(runs, None, rough_latencies())
    assert [point for points in found.decode.points for point in points] == pytest.approx([2.0, 40.0, 4.0, 80.0])
    assert ROUGH not in found.decode.source


def test_batches_of_several_sizes_tell_what_of_a_step_is_fixed(tmp_path: Path):
    # 1 s and 0.01 s a token: 100 tokens take 2 s, 300 take 4 s; the batches had 200 on average, as many as offered.
    small = {**ROW, "time/train_step_s": 2.0, "trainer/tokens_per_s": 50.0}
    large = {**ROW, "time/train_step_s": 4.0, "trainer/tokens_per_s": 75.0}
    found = measure([write_run(tmp_path, 9, [small, *[small, large] * 4])], None, rough_latencies())
    assert (found.trainer_fixed_s.value, found.trainer_token_s.value) == pytest.approx((1.0, 0.01))


def test_too_few_steps_are_an_error_with_the_remedy(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has 2 finished steps.*let the run go on, or give --latencies FILE"):
        measure([write_run(tmp_path, 2)], None, rough_latencies())


def test_what_is_no_run_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="is no run folder"):
        measure([tmp_path], None, rough_latencies())
