"""The loops of a training run: produce episodes, train on them, publish the weights, evaluate.

A step is on record before it is done (what it takes) and before its weights are seen (what it made); a checkpoint
makes both final. A run that is asked to stop parks its episodes: what they generate is given back and put on record.

None waits for another but through the buffer (episodes there, places back) and through two slots: the
newest staged weights, which the publishing loop takes, and the queue of versions to be evaluated. A
publish that takes longer than a step therefore skips versions and delays nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.buffer.starvation import UntrainedSteps
from agentrl.orchestration.assembly import RunParts
from agentrl.orchestration.evaluation import Evaluation
from agentrl.orchestration.production import Production
from agentrl.orchestration.redo import Redo, weights_digest
from agentrl.orchestration.run_directory import Progress, RunState, RunStatus
from agentrl.orchestration.shutdown import RunSummary, first_failure, result_or_stopped, stopping_on_signals
from agentrl.process.crash_points import crash_point
from agentrl.types.batch import TrainBatch, WeightsManifest
from agentrl.types.errors import StalledError
from agentrl.types.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class _EvaluationOrder:
    """A version to be evaluated; no manifest stands for the weights that the engine started with."""

    version: PolicyVersion
    manifest: WeightsManifest | None
    num_tasks: int


class Controller:
    """Runs the loops of one run over its parts.

    Invariant: `version` is the trainer's; engines serve it or an older one; every checkpoint holds a
    version and the tasks that are part of it.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._config, self._buffer, self._recorder = parts.config, parts.buffer, parts.recorder
        self.version = parts.start.version
        self._untrained = {policy: UntrainedSteps(parts.config.buffer) for policy in parts.policies}
        self._stop = asyncio.Event()
        self._staged: dict[str, WeightsManifest] = {}
        self._has_staged = asyncio.Event()
        self._orders: asyncio.Queue[_EvaluationOrder | None] = asyncio.Queue()
        self._pinned: set[str] = set()
        self._evaluations: list[Evaluation] = []
        self._production = Production(parts, lambda: self.version)

    async def run(self) -> RunSummary:
        """Train to the last step, or until asked to stop.

        Waits for: the training loop, then the evaluations in the queue. Unblocked by: their ends, or the
        failure of any loop.

        Raises:
            AgentRLError: a loop failed. Of several failures the first counts.
        """
        started = time.monotonic()
        self._write_state(RunStatus.RUNNING)
        status = RunStatus.FAILED
        with stopping_on_signals(self._announce_stop):
            try:
                await self._run_loops()
                status = RunStatus.STOPPED if self._stop.is_set() else RunStatus.FINISHED
            except BaseExceptionGroup as group:
                error = first_failure(group)
                self._write_state(RunStatus.FAILED, str(error))
                raise error from None
        self._finish(status)
        return self._summary(status, time.monotonic() - started)

    def _finish(self, status: RunStatus) -> None:
        """Of a run that is over, every episode reaches the ledger; one that stopped goes on with its own."""
        if self._production.is_over:
            self._buffer.close()
            self._recorder.finish_ledger()
        self._write_state(status)

    def request_stop(self) -> None:
        """Save a checkpoint after the step in progress, park the episodes and end."""
        self._stop.set()

    def _announce_stop(self) -> None:
        self._parts.observer.on_phase("stopping after this step; once more to end at once")
        self.request_stop()

    async def _run_loops(self) -> None:
        """Waits for: training and evaluation. Unblocked by: their ends, or the failure of any loop."""
        redo = Redo(self._parts)
        await redo.run()
        self.version, self._staged = redo.version, redo.staged
        async with asyncio.TaskGroup() as loops:
            service = [
                loops.create_task(self._production.run(), name="produce"),
                loops.create_task(self._publish(), name="publish"),
                loops.create_task(self._parts.runtime.watch(), name="watch"),
                *(loops.create_task(run()) for run in self._parts.services),
            ]
            evaluate = loops.create_task(self._evaluate(), name="evaluate")
            await self._train()
            if self._stop.is_set():
                await self._production.park()
            else:
                self._production.end()
            for task in service[:2]:
                task.cancel()
            if self._stop.is_set():
                evaluate.cancel()
            await asyncio.wait([evaluate])
            for task in service[2:]:
                task.cancel()

    async def _train(self) -> None:
        """Take, step, stage; checkpoint and order evaluations when due.

        Waits for: a batch. Unblocked by: the buffer, its stall deadline, or a request to stop.
        """
        self._order_evaluation(self._newest(), self._config.evaluation.final_tasks)
        while self.version.step < self._config.steps and not self._stop.is_set():
            waited_from = time.monotonic()
            batches = await self._take()
            if batches is None:
                break
            crash_point("batch.taken")
            waited_s = time.monotonic() - waited_from
            for policy, parts in self._parts.policies.items():
                self._check_has_tokens(batches[policy])
                report = await parts.trainer.step(batches[policy])
                crash_point("step.done")
                self.version = report.version
                await self._buffer.trained({policy: report.version})
                await self._stage(policy, report.version)
                counted = parts.serving.metrics()
                self._recorder.record_step(report, batches[policy], self._buffer, waited_s, counted)
            if self.version.step % self._config.checkpoint.interval_steps == 0:
                await self._checkpoint()
        await self._checkpoint()
        self._order_evaluation(self._newest(), self._config.evaluation.final_tasks)
        self._orders.put_nowait(None)

    async def _take(self) -> Mapping[str, TrainBatch] | None:
        """The next batches, or None if the run is to stop before they are there."""
        versions = dict.fromkeys(self._parts.policies, self.version)
        return await result_or_stopped(self._buffer.take(versions), self._stop)

    def _check_has_tokens(self, batch: TrainBatch) -> None:
        """Without a token to train the version would rise for ever, without a word. Raises StalledError."""
        if any(episode.trajectories for episode in batch.episodes) and not batch.num_sampled_tokens:
            limit = self._config.rollout.limits.max_context_tokens
            raise StalledError(
                f"no episode of the step after version {batch.version} has a sampled token: the first prompts do not "
                f"fit into rollout.limits.max_context_tokens = {limit}; raise it"
            )
        if (error := self._untrained[batch.policy].add(batch)) is not None:
            raise error

    async def _stage(self, policy: str, version: PolicyVersion) -> None:
        """Stage the new weights; nobody sees them before the step is on record."""
        trainer = self._parts.policies[policy].trainer
        manifest = await trainer.stage(version, self._parts.run.weights(policy, version))
        crash_point("weights.staged")
        await self._buffer.journal.stepped({policy: version}, {policy: weights_digest(manifest)})
        crash_point("step.recorded")
        self._staged[policy] = manifest
        self._has_staged.set()
        interval = self._config.evaluation.interval_steps
        if interval and version.step % interval == 0 and version.step < self._config.steps:
            self._order_evaluation(manifest, self._config.evaluation.tasks)

    async def _publish(self) -> None:
        """Bring the newest staged weights to the engines, again and again.

        Waits for: staged weights. Unblocked by: the training loop, or cancellation.
        """
        while True:
            await self._has_staged.wait()
            self._has_staged.clear()
            for policy, manifest in list(self._staged.items()):
                self._parts.journal.check()
                crash_point("publish.begun")
                receipts = await self._parts.policies[policy].serving.publisher.publish(manifest)
                crash_point("publish.done")
                self._recorder.record_publish(list(receipts))
                await self._buffer.loaded({policy: manifest.version})
                self._prune(policy)

    async def _evaluate(self) -> None:
        """Evaluate the ordered versions, one after the other, on an engine of their own.

        Waits for: orders. Unblocked by: the training loop, which puts None behind the last.
        """
        while (order := await self._orders.get()) is not None:
            evaluator = self._parts.evaluator
            if evaluator is None or order.num_tasks == 0:
                continue
            if order.manifest is not None:
                await evaluator.load(order.manifest)
                self._pinned.discard(order.manifest.path)
            evaluation = await evaluator.run(order.version, order.num_tasks)
            self._evaluations.append(evaluation)
            await self._recorder.record_evaluation(evaluation)

    def _order_evaluation(self, manifest: WeightsManifest | None, num_tasks: int) -> None:
        if manifest is not None:
            self._pinned.add(manifest.path)
        self._orders.put_nowait(_EvaluationOrder(self.version, manifest, num_tasks))

    async def _checkpoint(self) -> None:
        """Save trainer and tasks; without a step since the start there is nothing new to save."""
        if self.version == self._parts.start.version:
            return
        self._parts.journal.check()
        run = self._parts.run
        folder = run.checkpoint(self.version.step)
        for parts in self._parts.policies.values():
            await parts.trainer.save(folder)
        crash_point("checkpoint.saved")
        self._parts.journal.check()
        self._buffer.journal.begin_checkpoint()
        frontier, ledger_bytes = self._buffer.frontier(), self._recorder.finish_ledger()
        crash_point("ledger.written")
        await self._buffer.journal.settled()
        progress = Progress(self.version, frontier, ledger_bytes, self._parts.journal.ends())
        await asyncio.to_thread(run.write_progress, folder, progress)
        crash_point("checkpoint.complete")
        await self._buffer.journal.checkpointed(self.version.step)
        self._parts.journal.tidy()
        run.prune_checkpoints(self._config.checkpoint.keep)
        self._write_state(RunStatus.RUNNING)

    def _newest(self) -> WeightsManifest | None:
        return next(iter(self._staged.values()), None)

    def _prune(self, policy: str) -> None:
        newest = {manifest.path for manifest in self._staged.values()}
        keep = self._config.policies[policy].publish.keep_versions
        self._parts.run.prune_weights(policy, keep, self._pinned | newest)

    def _write_state(self, status: RunStatus, message: str = "") -> None:
        """Say how the run stands, unless another process has it by now."""
        if self._parts.journal.is_held:
            self._parts.run.write_state(RunState(status, self.version, message))

    def _summary(self, status: RunStatus, seconds: float) -> RunSummary:
        return RunSummary(
            run=self._parts.run.path,
            status=status,
            version=self.version,
            first_evaluation=self._evaluations[0] if self._evaluations else None,
            last_evaluation=self._evaluations[-1] if self._evaluations else None,
            seconds=seconds,
            aborted_generations=sum(parts.serving.router.interrupted for parts in self._parts.policies.values()),
            regenerated_requests=sum(parts.serving.router.regenerated for parts in self._parts.policies.values()),
            max_staleness=self._recorder.max_staleness,
            goodput=self._buffer.ledger.goodput(),
        )
