"""Writes down what a run does: metrics, sample episodes, ledger, curve; tells whoever watches."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from agentrl import codec
from agentrl.buffer.episode_buffer import MemoryBuffer
from agentrl.buffer.group import holds
from agentrl.buffer.ledger import LedgerLine
from agentrl.orchestration.evaluation import Evaluation
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.orchestration.tally import Tally, metric_prefix
from agentrl.protocols import MetricSink
from agentrl.telemetry.curve import draw_curve
from agentrl.telemetry.json_lines import JsonLines, read_json_lines
from agentrl.telemetry.prometheus_names import StepNumbers
from agentrl.telemetry.sinks import JsonlSink, SinkSet, TensorBoardSink
from agentrl.types.batch import Receipt, StepReport, TrainBatch, TrainTrajectory
from agentrl.types.episode import Episode


class RunObserver(Protocol):
    """Hears of a run's progress; the command line prints it."""

    def on_start(self, run: str, total_steps: int, policies: Sequence[str]) -> None:
        """The run's folder, its length in steps and the policies that it trains."""
        ...

    def on_phase(self, text: str) -> None:
        """The run begins something that takes a while."""
        ...

    def on_step(self, policy: str, step: int, metrics: dict[str, float]) -> None:
        """A step of a policy is done."""
        ...

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """An evaluation is done."""
        ...


class SilentObserver:
    """Watches without a word."""

    def on_start(self, run: str, total_steps: int, policies: Sequence[str]) -> None:
        """Nothing."""

    def on_phase(self, text: str) -> None:
        """Nothing."""

    def on_step(self, policy: str, step: int, metrics: dict[str, float]) -> None:
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
        self.numbers = StepNumbers([])
        self._files: list[MetricSink] = [JsonlSink(run.metrics), TensorBoardSink(run.path / "tensorboard")]
        self._sinks = SinkSet([*self._files, self.numbers])
        self._ledger = JsonLines(run.ledger)
        self._pending_lines: list[LedgerLine] = []
        self._train_episodes = JsonLines(run.path / "episodes" / "train.jsonl")
        self._heldout_episodes = JsonLines(run.path / "episodes" / "heldout.jsonl")
        self._failed_episodes = JsonLines(run.path / "episodes" / "failed.jsonl")
        self._tallies: dict[str, Tally] = {}
        self._kept_group: int | None = None
        self.max_staleness = 0

    def follow(self, environments: Mapping[str, Collection[str]]) -> None:
        """Count for these policies, each with the environments that it is trained in, from here on.

        Of several policies, names of metrics begin with the policy's.
        """
        names = list(environments)
        self.numbers = StepNumbers(names)
        self._sinks = SinkSet([*self._files, self.numbers])
        self._tallies = {name: Tally(name, metric_prefix(name, names), environments[name]) for name in names}

    def outcomes(self, policy: str) -> Mapping[str, int]:
        """How many of a policy's episodes ended in which way, since the process began."""
        return self._tallies[policy].outcomes

    def failures(self, policy: str) -> Mapping[str, int]:
        """How many of a policy's episodes failed by boundary and kind, since the process began."""
        return self._tallies[policy].failures

    def write_ledger_line(self, line: LedgerLine) -> None:
        """Take the end of an episode, which is final with the next checkpoint."""
        self._pending_lines.append(line)

    def finish_ledger(self, checkpoint: Mapping[str, int]) -> int:
        """Write the ends that a checkpoint of these steps makes final; returns the ledger's size in bytes.

        Raises:
            StorageError: it cannot be written.
        """
        waiting = []
        for line in self._pending_lines:
            if holds(checkpoint, line.trained_by):
                self._ledger.append(codec.to_json(line).decode())
            else:
                waiting.append(line)
        self._pending_lines = waiting
        return self._ledger.sync()

    def record_episode(self, episode: Episode) -> None:
        """Count an episode that is over."""
        for tally in self._tallies.values():
            tally.add(episode)
        if episode.failure is not None:
            self._failed_episodes.append(_for_people(episode))
        if self._kept_group is None:
            self._kept_group = episode.ticket.group
        if episode.ticket.group == self._kept_group:
            self._train_episodes.append(_for_people(episode))

    def record_publish(self, policy: str, receipts: list[Receipt]) -> None:
        """Count a publication."""
        self._tallies[policy].add_publication(receipts)

    def record_step(
        self,
        policy: str,
        report: StepReport,
        batch: TrainBatch,
        buffer: MemoryBuffer,
        waited_s: float,
        counted: Mapping[str, float],
    ) -> None:
        """Write the metrics of a policy's step, and what is counted elsewhere as it stands now."""
        tally = self._tallies[policy]
        metrics = {**report.metrics, **tally.take(), **_batch_metrics(batch), **buffer.ledger.goodput()}
        metrics |= _mix_metrics(batch, tally.environments)
        metrics |= counted
        self.max_staleness = max(self.max_staleness, int(metrics["buffer/staleness_max_steps"]))
        metrics["buffer/unforked_episodes_total"] = float(buffer.num_unforked)
        metrics["buffer/ready_episodes"] = buffer.num_ready(policy)
        metrics["buffer/running_episodes"] = buffer.num_running
        metrics["time/wait_for_batch_s"] = waited_s
        self._sinks.write(report.version.step, tally.named(metrics))
        self._observer.on_step(policy, report.version.step, metrics)
        self._kept_group = None

    def last_step(self, policy: str) -> int:
        """The newest step of a policy that has metrics; 0 without one. Reads the whole file."""
        name = f"{self._tallies[policy].prefix}time/step_s"
        return max((row["step"] for row in read_json_lines(self._run.metrics) if name in row), default=0)

    async def record_evaluation(self, evaluation: Evaluation) -> None:
        """Write an evaluation and draw the curve anew."""
        tally = self._tallies.get(evaluation.policy, Tally(evaluation.policy, ""))
        self._sinks.write(evaluation.version.step, tally.named(evaluation.metrics()))
        for episode in evaluation.sample:
            self._heldout_episodes.append(_for_people(episode))
        self._observer.on_evaluation(evaluation)
        several = list(self._tallies) if len(self._tallies) > 1 else []
        await asyncio.to_thread(draw_curve, self._run.metrics, self._run.curve, self._title, several)

    def close(self) -> None:
        """Close the files; safe to call twice."""
        self._sinks.close()
        for lines in (self._ledger, self._train_episodes, self._heldout_episodes, self._failed_episodes):
            lines.close()


def _for_people(episode: Episode) -> str:
    """An episode as JSON, without the experts of every position, which nobody reads."""
    nodes = [
        replace(node, sample=replace(node.sample, routed_experts=None)) if node.sample is not None else node
        for node in episode.nodes
    ]
    return codec.to_json(replace(episode, nodes=tuple(nodes))).decode()


def _batch_metrics(batch: TrainBatch) -> dict[str, float]:
    views = [t for e in batch.episodes for t in e.trajectories]
    sampled = batch.num_sampled_tokens - batch.num_pinned_tokens
    rewards = [reward for e in batch.episodes for reward in (e.agent_rewards.values() or [e.reward])]
    return {
        "buffer/staleness_max_steps": float(max((t.staleness[t.loss_mask].max(initial=0) for t in views), default=0)),
        "buffer/staleness_mean_steps": sum(float(t.staleness[t.trajectory.sampled].sum()) for t in views)
        / max(sampled, 1),
        "buffer/masked_fraction": 1 - batch.num_trained_tokens / max(sampled, 1),
        "buffer/orphaned_fraction": sum(_num_orphans(t, batch.version.epoch) for t in views) / max(sampled, 1),
        "buffer/forked_episodes": float(sum(bool(episode.fork) for episode in batch.episodes)),
        "buffer/pinned_tokens": float(batch.num_pinned_tokens),
        "batch/reward_mean": sum(rewards) / len(rewards),
        "batch/episodes": float(len(batch.episodes)),
        "batch/trained_tokens": float(batch.num_trained_tokens),
    }


def _mix_metrics(batch: TrainBatch, environments: Collection[str]) -> dict[str, float]:
    """What a batch has of each of several environments."""
    metrics: dict[str, float] = {}
    for name in environments if len(environments) > 1 else ():
        episodes = [episode for episode in batch.episodes if episode.environment == name]
        trained = sum(int(t.loss_mask.sum()) for episode in episodes for t in episode.trajectories)
        metrics[f"environment/{name}/batch_groups"] = float(len({episode.group for episode in episodes}))
        metrics[f"environment/{name}/batch_episodes"] = float(len(episodes))
        metrics[f"environment/{name}/trained_tokens"] = float(trained)
    return metrics


def _num_orphans(view: TrainTrajectory, epoch: int) -> int:
    """Tokens of weights that a crash took and that did not come back: they train, corrected like stale ones."""
    return sum(span.end - span.start for span in view.trajectory.versions if span.version.epoch < epoch)
