"""Writes down what a run does: metrics, sample episodes, ledger, curve; tells whoever watches."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from agentrl import codec
from agentrl.buffer.episode_buffer import MemoryBuffer
from agentrl.buffer.ledger import LedgerLine
from agentrl.orchestration.evaluation import Evaluation
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.telemetry.curve import draw_curve
from agentrl.telemetry.sinks import JsonLines, JsonlSink, SinkSet, TensorBoardSink, read_json_lines
from agentrl.types.batch import Receipt, StepReport, TrainBatch, TrainTrajectory
from agentrl.types.episode import Episode


class RunObserver(Protocol):
    """Hears of a run's progress; the command line prints it."""

    def on_start(self, run: str, total_steps: int) -> None:
        """The run's folder and its length in steps."""
        ...

    def on_phase(self, text: str) -> None:
        """The run begins something that takes a while."""
        ...

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """A step is done."""
        ...

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """An evaluation is done."""
        ...


class SilentObserver:
    """Watches without a word."""

    def on_start(self, run: str, total_steps: int) -> None:
        """Nothing."""

    def on_phase(self, text: str) -> None:
        """Nothing."""

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Nothing."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Nothing."""


class Recorder:
    """Collects between steps and writes one line a step.

    Every dispatched episode reaches the ledger, with the checkpoint that makes its end final; one group a step is
    kept whole, for people to read.
    """

    def __init__(self, run: RunDirectory, title: str, observer: RunObserver) -> None:
        self._run, self._title, self._observer = run, title, observer
        self._sinks = SinkSet([JsonlSink(run.metrics), TensorBoardSink(run.path / "tensorboard")])
        self._ledger = JsonLines(run.ledger)
        self._pending_lines: list[LedgerLine] = []
        self._train_episodes = JsonLines(run.path / "episodes" / "train.jsonl")
        self._heldout_episodes = JsonLines(run.path / "episodes" / "heldout.jsonl")
        self._failed_episodes = JsonLines(run.path / "episodes" / "failed.jsonl")
        self._counts: Counter[str] = Counter()
        self._reward_sum = 0.0
        self._kept_group: int | None = None
        self._gaps_s: list[float] = []
        self._last_step_at = time.monotonic()
        self.max_staleness = 0

    def write_ledger_line(self, line: LedgerLine) -> None:
        """Take the end of an episode, which is final with the next checkpoint."""
        self._pending_lines.append(line)

    def finish_ledger(self) -> int:
        """Write the ends that a checkpoint makes final; returns the ledger's size in bytes. Raises StorageError."""
        for line in self._pending_lines:
            self._ledger.append(codec.to_json(line).decode())
        self._pending_lines.clear()
        return self._ledger.sync()

    def record_episode(self, episode: Episode) -> None:
        """Count an episode that is over."""
        self._counts["episodes"] += 1
        self._counts["turns"] += len(episode.turns)
        self._counts["sampled_tokens"] += episode.num_sampled_tokens
        self._counts["aborts"] += sum(turn.aborts for turn in episode.turns)
        self._reward_sum += episode.reward or 0.0
        self._counts["scored"] += episode.reward is not None
        if episode.failure is not None:
            self._counts["failed"] += 1
            self._counts[f"failed_{episode.failure.boundary}_{episode.failure.kind}"] += 1
            self._failed_episodes.append(_for_people(episode))
        elif episode.stop_reason is not None:
            self._counts[f"stopped_{episode.stop_reason}"] += 1
        if self._kept_group is None:
            self._kept_group = episode.ticket.group
        if episode.ticket.group == self._kept_group:
            self._train_episodes.append(_for_people(episode))

    def record_publish(self, receipts: list[Receipt]) -> None:
        """Count a publication."""
        self._counts["publish_ms"] += round(1000 * max(receipt.seconds for receipt in receipts))
        self._counts["published"] += 1
        self._gaps_s += [receipt.gap_s for receipt in receipts]

    def record_step(
        self,
        report: StepReport,
        batch: TrainBatch,
        buffer: MemoryBuffer,
        waited_s: float,
        counted: Mapping[str, float],
    ) -> None:
        """Write the metrics of a step, and what is counted elsewhere as it stands now."""
        metrics = {**report.metrics, **self._rollout_metrics(), **_batch_metrics(batch), **buffer.ledger.goodput()}
        metrics |= counted
        self.max_staleness = max(self.max_staleness, int(metrics["buffer/staleness_max_steps"]))
        metrics["buffer/ready_episodes"] = buffer.num_ready
        metrics["buffer/running_episodes"] = buffer.num_running
        metrics["time/wait_for_batch_s"] = waited_s
        now = time.monotonic()
        metrics["time/step_s"] = now - self._last_step_at
        self._last_step_at = now
        self._sinks.write(report.version.step, metrics)
        self._observer.on_step(report.version.step, metrics)
        self._counts.clear()
        self._reward_sum = 0.0
        self._gaps_s.clear()
        self._kept_group = None

    def last_step(self) -> int:
        """The newest step that has metrics; 0 without one. Reads the whole file."""
        return max((row["step"] for row in read_json_lines(self._run.metrics)), default=0)

    async def record_evaluation(self, evaluation: Evaluation) -> None:
        """Write an evaluation and draw the curve anew."""
        self._sinks.write(evaluation.version.step, evaluation.metrics())
        for episode in evaluation.sample:
            self._heldout_episodes.append(_for_people(episode))
        self._observer.on_evaluation(evaluation)
        await asyncio.to_thread(draw_curve, self._run.metrics, self._run.curve, self._title)

    def close(self) -> None:
        """Close the files; safe to call twice."""
        self._sinks.close()
        for lines in (self._ledger, self._train_episodes, self._heldout_episodes, self._failed_episodes):
            lines.close()

    def _rollout_metrics(self) -> dict[str, float]:
        """What happened since the last step; the mean of nothing is left out, since it is not 0."""
        counts = self._counts
        metrics = {
            "rollout/episodes": float(counts["episodes"]),
            "rollout/aborted_generations": float(counts["aborts"]),
        }
        if counts["scored"]:
            metrics["rollout/reward_mean"] = self._reward_sum / counts["scored"]
        if counts["published"]:
            metrics["time/publish_s"] = counts["publish_ms"] / 1000 / counts["published"]
        if self._gaps_s:
            metrics["publish/gap_max_s"] = max(self._gaps_s)
        if not counts["episodes"]:
            return metrics
        for name in ("turns", "sampled_tokens"):
            metrics[f"rollout/{name}_mean"] = counts[name] / counts["episodes"]
        metrics["rollout/failed_fraction"] = counts["failed"] / counts["episodes"]
        for name, count in counts.items():
            if name.startswith(("failed_", "stopped_")):
                metrics[f"rollout/{name}_fraction"] = count / counts["episodes"]
        return metrics


def _for_people(episode: Episode) -> str:
    """An episode as JSON, without the experts of every position, which nobody reads."""
    nodes = [
        replace(node, sample=replace(node.sample, routed_experts=None)) if node.sample is not None else node
        for node in episode.nodes
    ]
    return codec.to_json(replace(episode, nodes=tuple(nodes))).decode()


def _batch_metrics(batch: TrainBatch) -> dict[str, float]:
    views = [t for e in batch.episodes for t in e.trajectories]
    sampled = sum(int(t.trajectory.sampled.sum()) for t in views)
    rewards = [e.reward for e in batch.episodes]
    return {
        "buffer/staleness_max_steps": float(max((t.staleness[t.loss_mask].max(initial=0) for t in views), default=0)),
        "buffer/staleness_mean_steps": sum(float(t.staleness[t.trajectory.sampled].sum()) for t in views)
        / max(sampled, 1),
        "buffer/masked_fraction": 1 - batch.num_trained_tokens / max(sampled, 1),
        "buffer/orphaned_fraction": sum(_num_orphans(t, batch.version.epoch) for t in views) / max(sampled, 1),
        "batch/reward_mean": sum(rewards) / len(rewards),
        "batch/episodes": float(len(batch.episodes)),
        "batch/trained_tokens": float(batch.num_trained_tokens),
    }


def _num_orphans(view: TrainTrajectory, epoch: int) -> int:
    """Tokens of weights that a crash took and that did not come back: they train, corrected like stale ones."""
    return sum(span.end - span.start for span in view.trajectory.versions if span.version.epoch < epoch)
