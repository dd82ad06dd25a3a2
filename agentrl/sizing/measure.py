"""Latencies of a run that was made, from its metrics, its ledger and the episodes that it kept whole.

A reply's time is all its session's: what the engine, the connection and the run's own loop take. So the curve of an
engine is what its sessions see of it, and prefill is in it. Turns that an abort cut short are left out of it, and say
what a pause costs instead, which grows with the number of those that it interrupts. What a run does not write down
stays rough: `engine_slots`, the curve's other points where only one run is given, and scorers, which the plan asks for
by name.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.buffer.ledger import LedgerLine, read_ledger
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.run_directory import RunDirectory, read_episodes
from agentrl.orchestration.tally import metric_prefix
from agentrl.sizing.concurrency import sequences_at_once
from agentrl.sizing.latencies import ROUGH, DecodeCurve, EpisodeShape, Latencies, Measured, Shapes
from agentrl.sizing.setup import setup_of
from agentrl.telemetry.json_lines import read_json_lines
from agentrl.types.episode import Episode
from agentrl.types.errors import ConfigError

LEAST_STEPS = 4
_SPREAD = 1.3  # of two numbers, from which on a line through them says more than noise does
_ROUGH_GAIN = 2.0  # how much faster a sequence alone is taken to be than all that one run had at once


@dataclass(frozen=True, slots=True)
class _Run:
    """One run's records. `rows` are those of the policy's steps behind its beginning, under their common names."""

    name: str
    config: RunConfig
    policy: str
    rows: Sequence[dict[str, float]]
    ends: Sequence[LedgerLine]
    kept: Sequence[Episode]

    @property
    def wall_s(self) -> float:
        return sum(row["time/step_s"] for row in self.rows)

    def mean(self, name: str) -> float:
        """Mean over the steps that have this metric; 0 without one."""
        return statistics.fmean([row[name] for row in self.rows if name in row] or [0.0])


def measure(folders: Sequence[Path], policy: str | None, base: Latencies) -> Latencies:
    """What runs tell, and of the rest what `base` says.

    Two runs with different `rollout.concurrency` tell how engines slow down, two with different batches what of a step
    is fixed; of all else the first counts. On one machine that should be a run in turn (`buffer.max_staleness` 0), in
    which no process takes anything from another.

    Raises:
        ConfigError: a folder is none of a run, or its run has made too few steps.
        StorageError: a file of it is damaged.
    """
    runs = [_read(folder, policy) for folder in folders]
    first = runs[0]
    setup = setup_of(first.config, first.policy)
    publish_s, interrupt_s = _publication(runs)
    points = tuple(sorted(_decode_point(run) for run in runs))
    shapes = _shapes(runs)
    fixed_s, token_s = _trainer(runs, shapes)

    def figure(value: float, unit: str, source: str = first.name) -> Measured:
        return Measured(value, unit, source)

    return replace(
        base,
        decode=_curve(points, ", ".join(run.name for run in runs)),
        engine_slots=_slots(first, base),
        request_s=figure(0.0, "s", "in decode"),
        prefill_token_s=figure(0.0, "s/token", "in decode"),
        shapes=shapes,
        environment_start_s=figure(_start_s(first), "s"),
        environment_score_s=figure(0.0, "s", "in environment start"),
        trainer_fixed_s=figure(fixed_s, "s"),
        trainer_token_s=figure(token_s, "s/token"),
        ranks=figure(float(setup.ranks), "ranks"),
        stage_s=figure(
            max(first.mean("time/step_s") - first.mean("time/wait_for_batch_s") - first.mean("time/train_step_s"), 0.0),
            "s",
        ),
        publish_s=figure(publish_s, "s"),
        pause_s=figure(min(publish_s, max(_pause_s(first) - interrupt_s * _interrupted(first), 0.0)), "s"),
        interrupt_s=figure(interrupt_s, "s/sequence"),
        dropped_groups=figure(_dropped_fraction(first), "fraction"),
    )


def _read(folder: Path, policy: str | None) -> _Run:
    run = RunDirectory.open(folder)
    config = run.config()
    name = policy or (config.trained[0] if len(config.trained) == 1 else None)
    if name not in config.trained:
        raise ConfigError(f"{folder} trains {', '.join(config.trained)}: say which is meant with --policy")
    prefix = metric_prefix(name, config.trained)
    rows = [_of_policy(row, prefix) for row in (read_json_lines(run.metrics) if run.metrics.is_file() else ())]
    rows = [row for row in rows if "time/step_s" in row]
    if len(rows) < LEAST_STEPS or not any(row.get("trainer/tokens_per_s", 0.0) > 0 for row in rows[1:]):
        raise ConfigError(
            f"{folder} has {len(rows)} finished steps, and latencies are measured from {LEAST_STEPS} or more: let the "
            "run go on, or give --latencies FILE or --rough"
        )
    kept = read_episodes(run.episodes / "train.jsonl")
    ends = read_ledger(run.ledger) if run.ledger.is_file() else []
    played = config.played_by(name)
    whole = [episode for episode in kept if episode.failure is None and episode.ticket.environment in played]
    if not any(turn.aborts == 0 and turn.generation_s > 0 for episode in whole for turn in episode.turns):
        raise ConfigError(f"{folder} has kept no whole episode, so nothing tells its turns: take another run")
    return _Run(
        str(folder),
        config,
        name,
        rows[max(1, len(rows) // 5) :],
        [line for line in ends if line.environment in played and line.turns],
        whole,
    )


def _of_policy(row: dict[str, Any], prefix: str) -> dict[str, float]:
    return {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}


def _replies(run: _Run, is_aborted: bool) -> list[tuple[float, float, int]]:
    """Tokens, seconds and aborts of the replies of kept episodes, those that were cut short or the others."""
    return [
        (float(len(episode.nodes[turn.reply_node].token_ids)), turn.generation_s, turn.aborts)
        for episode in run.kept
        for turn in episode.turns
        if (turn.aborts > 0) is is_aborted
    ]


def _token_s(run: _Run) -> float:
    replies = _replies(run, is_aborted=False)
    return sum(seconds for _, seconds, _ in replies) / sum(tokens for tokens, _, _ in replies)


def _pause_s(run: _Run) -> float:
    """What an abort costs a reply, beside its tokens."""
    replies, token_s = _replies(run, is_aborted=True), _token_s(run)
    if not replies:
        return run.mean("publish/gap_max_s")
    lost_s = sum(seconds - token_s * tokens for tokens, seconds, _ in replies) / sum(n for _, _, n in replies)
    return min(max(lost_s, 0.0), run.mean("time/publish_s"))


def _interrupted(run: _Run) -> float:
    """Sequences of an engine that a publication interrupts, on average."""
    return run.mean("rollout/aborted_generations") / setup_of(run.config, run.policy).engines


def _publication(runs: Sequence[_Run]) -> tuple[float, float]:
    """Seconds of a publication that interrupts nothing, and of each sequence that one interrupts, by least squares."""
    points = [
        (row["rollout/aborted_generations"] / setup_of(run.config, run.policy).engines, row["time/publish_s"])
        for run in runs
        for row in run.rows
        if "time/publish_s" in row and "rollout/aborted_generations" in row
    ]
    counts, seconds = [count for count, _ in points], [took_s for _, took_s in points]
    if len(points) < LEAST_STEPS or max(counts) < _SPREAD * min(counts) + 1:
        return runs[0].mean("time/publish_s"), 0.0
    slope, fixed_s = statistics.linear_regression(counts, seconds)
    if slope <= 0:
        return runs[0].mean("time/publish_s"), 0.0
    return (fixed_s, slope) if fixed_s > 0 else (0.0, sum(seconds) / sum(counts))


def _decode_point(run: _Run) -> tuple[float, float]:
    """Sequences of one engine while it did not stand still, and their tokens a second.

    Spans tell how many there were; without spans, or where several policies wrote them, the tokens of all steps do.
    """
    engines = setup_of(run.config, run.policy).engines
    at_once = sequences_at_once(Path(run.name)) if len(run.config.policies) == 1 else None
    if at_once is not None:
        number = max(at_once / engines, 1.0)
        return number, number / _token_s(run)
    tokens = sum(row["rollout/episodes"] * row.get("rollout/sampled_tokens_mean", 0.0) for row in run.rows)
    if not run.config.buffer_of(run.policy).max_staleness:  # engines rest while the trainer steps
        rate = tokens / engines / sum(row["time/wait_for_batch_s"] for row in run.rows)
        return max(rate * _token_s(run), 1.0), rate
    paused_s = _pause_s(run) * sum("time/publish_s" in row for row in run.rows)
    # At least half of the time counts: more pauses than that are not pauses, but a crowded machine.
    rate = tokens / engines / max(run.wall_s - paused_s, run.wall_s / 2)
    return max(rate * _token_s(run), 1.0), rate


def _curve(points: tuple[tuple[float, float], ...], source: str) -> DecodeCurve:
    """The line through all points, or through the only one that there is and a rough one."""
    (low, _), (high, rate) = points[0], points[-1]
    if high >= _SPREAD * low:
        return DecodeCurve(points, source)
    if high <= _SPREAD:
        return DecodeCurve(((1.0, rate / high), (2.0, rate / high * 1.5)), f"{source}; its growth: {ROUGH}")
    return DecodeCurve(((1.0, _ROUGH_GAIN * rate / high), (high, rate)), f"{source}; alone: {ROUGH}")


def _slots(run: _Run, base: Latencies) -> Measured:
    """The engine's own bound where the recipe has it."""
    engine = run.config.policies[run.policy].engine
    given = {} if engine.kind == "attached" else engine.args
    found = next((given[name] for name in ("max-running-requests", "max_running_requests") if name in given), None)
    if found is not None:
        return Measured(float(found), "sequences", f"{run.name}, engine.args")
    return Measured(64.0, "sequences", "embedded engine") if engine.kind == "embedded" else base.engine_slots


def _trainer(runs: Sequence[_Run], shapes: Shapes) -> tuple[float, float]:
    """Seconds of a step beside its tokens, and of a token of its episodes in one pass, by least squares.

    Episodes that have nothing to teach go through no pass; their tokens make the others' cheaper.
    """
    rows = [row for run in runs for row in run.rows if row.get("trainer/tokens_per_s", 0.0) > 0]
    seconds = [row["time/train_step_s"] for row in rows]
    tokens = [row["trainer/tokens_per_s"] * row["time/train_step_s"] for row in rows]
    passes = {run.name: setup_of(run.config, run.policy).passes for run in runs}
    offered = sum(row["batch/episodes"] * passes[run.name] for run in runs for row in run.rows)
    offered *= shapes.mean([shape.num_tokens for shape in shapes.episodes])
    used, take_s = sum(tokens) / offered, _take_s(runs)
    by_size = sorted(tokens)
    if by_size[-1 - len(by_size) // 10] >= _SPREAD * by_size[len(by_size) // 10]:
        slope, fixed_s = statistics.linear_regression(tokens, seconds)
        if slope > 0 and fixed_s > 0:
            return take_s + fixed_s, slope * used
    return take_s, sum(seconds) / sum(tokens) * used


def _take_s(runs: Sequence[_Run]) -> float:
    """What taking a batch costs that has long been ready; 0 where no step found one."""
    waits = [
        row["time/wait_for_batch_s"]
        for run in runs
        for before, row in zip(run.rows, run.rows[1:], strict=False)
        if before["buffer/ready_episodes"] >= run.config.buffer_of(run.policy).episodes_per_step
    ]
    return statistics.median(waits) if waits else 0.0


def _shapes(runs: Sequence[_Run]) -> Shapes:
    """Every episode that was played to its end: turns, tokens and tool seconds of its own, shared out evenly."""
    first, later = _prompts([episode for run in runs for episode in run.kept])
    ends = [line for run in runs for line in run.ends if line.reason != "run_ended" and line.sampled_tokens]
    shapes = [
        EpisodeShape(
            (first, *[later] * (line.turns - 1)),
            (line.sampled_tokens / line.turns,) * line.turns,
            (line.tool_s / line.turns,) * line.turns,
        )
        for line in ends
    ]
    if not shapes:
        shapes = [_shape(episode) for run in runs for episode in run.kept if episode.turns]
    return Shapes(tuple(shapes), ", ".join(run.name for run in runs))


def _shape(episode: Episode) -> EpisodeShape:
    first, later = _prompts([episode])
    replies = [float(len(episode.nodes[turn.reply_node].token_ids)) for turn in episode.turns]
    return EpisodeShape(
        (first, *[later] * (len(replies) - 1)), tuple(replies), tuple(turn.environment_s for turn in episode.turns)
    )


def _prompts(episodes: Sequence[Episode]) -> tuple[float, float]:
    """Mean tokens that no policy drew: of the first prompt, and behind each reply but the last."""
    first = [float(len(episode.nodes[0].token_ids)) for episode in episodes]
    rest = [
        float(sum(len(node.token_ids) for node in episode.nodes[1:] if node.sample is None)) for episode in episodes
    ]
    gaps = sum(max(len(episode.turns) - 1, 0) for episode in episodes)
    return statistics.fmean(first), sum(rest) / gaps if gaps else 0.0


def _start_s(run: _Run) -> float:
    """What an episode takes beside its turns: opening, verdict, and the run's own work."""
    rest = [
        episode.seconds - sum(turn.generation_s + turn.environment_s for turn in episode.turns) for episode in run.kept
    ]
    return max(statistics.fmean(rest), 0.0)


def _dropped_fraction(run: _Run) -> float:
    """Of the groups that came to an end of their own."""
    ended = {line.group: line.outcome for line in run.ends if line.reason != "run_ended"}
    dropped = sum(outcome == "dropped" for outcome in ended.values())
    return min(dropped / len(ended), 0.95) if ended else 0.0
