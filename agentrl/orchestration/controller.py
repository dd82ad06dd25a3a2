"""The loops of a training run: produce episodes; train and publish each policy; evaluate.

A step is on record before it is done (what it takes) and before its weights are seen (what it made); a checkpoint
makes both final. A run that is asked to stop parks its episodes: what they generate is given back and put on record.

None waits for another but through the buffer (episodes there, places back), through the newest staged weights of
each policy, which its publishing loop takes, and through the queue of versions to be evaluated. A
publish that takes longer than a step therefore skips versions and delays nobody.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from agentrl.orchestration.assembly import RunParts
from agentrl.orchestration.evaluation import Evaluation
from agentrl.orchestration.policy_loop import PolicyLoop
from agentrl.orchestration.production import Production
from agentrl.orchestration.run_directory import Progress, RunState, RunStatus
from agentrl.orchestration.run_files import marks_now
from agentrl.orchestration.shutdown import RunSummary, first_failure
from agentrl.process.crash_points import crash_point
from agentrl.telemetry.spans import SpanKind
from agentrl.types.batch import WeightsManifest
from agentrl.types.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class _EvaluationOrder:
    """A policy to be evaluated, with the newest weights of all trained policies at that moment.

    `manifests` has those that have made a step; the others play with the weights that their engines started with.
    """

    policy: str
    version: PolicyVersion
    manifests: dict[str, WeightsManifest]
    num_tasks: int


class Controller:
    """Runs the loops of one run over its parts.

    Invariant: every checkpoint holds a version of each trained policy and the tasks that are part of these.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._config, self._buffer, self._recorder = parts.config, parts.buffer, parts.recorder
        self._stop = asyncio.Event()
        self._loops = {policy: PolicyLoop(parts, policy, self._stop) for policy in parts.config.trained}
        self._saved = {policy: parts.start.versions[policy] for policy in self._loops}
        self._num_checkpoints = parts.start.number
        self._checkpointing = asyncio.Lock()
        self._orders: asyncio.Queue[_EvaluationOrder | None] = asyncio.Queue()
        self._evaluations: list[Evaluation] = []
        self._production = Production(parts)

    def versions(self) -> dict[str, PolicyVersion]:
        """The version of each trained policy."""
        return {policy: loop.version for policy, loop in self._loops.items()}

    async def run(self) -> RunSummary:
        """Train to the last step, or until asked to stop.

        Waits for: the training loops, then the evaluations in the queue. Unblocked by: their ends, or the
        failure of any loop.

        Raises:
            AgentRLError: a loop failed. Of several failures the first counts.
        """
        started = time.monotonic()
        self._write_state(RunStatus.RUNNING)
        try:
            await self._run_loops()
            status = RunStatus.STOPPED if self._stop.is_set() else RunStatus.FINISHED
        except BaseExceptionGroup as group:
            error = first_failure(group)
            self._write_state(RunStatus.FAILED, str(error))
            raise error from None
        await self._finish(status)
        return self._summary(status, time.monotonic() - started)

    async def _finish(self, status: RunStatus) -> None:
        """Of a run that is over, every episode reaches the ledger; one that stopped goes on with its own.

        It has finished once all of these are archived (`run_end`), for which engines and trainer are not needed.

        Waits for: the disk.
        """
        if self._production.is_over:
            on_record = await self._parts.journal.played(self._buffer.unsettled())
            self._buffer.close({**self._production.cut_off, **on_record})
            self._recorder.finish_ledger({policy: version.step for policy, version in self.versions().items()})
        self._write_state(RunStatus.UNARCHIVED if status is RunStatus.FINISHED else status)
        if status is RunStatus.FINISHED:
            crash_point("run.ended")

    def request_stop(self) -> None:
        """Save a checkpoint after the steps in progress, park the episodes and end."""
        self._parts.observer.on_phase("stopping after this step; once more to end at once")
        self._stop.set()

    async def _run_loops(self) -> None:
        """Waits for: training and evaluation. Unblocked by: their ends, or the failure of any loop."""
        async with asyncio.TaskGroup() as redoing:
            for loop in self._loops.values():
                redoing.create_task(loop.redo(), name=f"redo-{loop.policy}")
        async with asyncio.TaskGroup() as loops:
            work = [
                loops.create_task(self._production.run(), name="produce"),
                *(loops.create_task(loop.publish(), name=f"publish-{loop.policy}") for loop in self._loops.values()),
            ]
            service = [
                loops.create_task(self._parts.runtime.watch(), name="watch"),
                *(loops.create_task(run()) for run in self._parts.services),
            ]
            evaluate = loops.create_task(self._evaluate(), name="evaluate")
            self._order_final_evaluations()
            async with asyncio.TaskGroup() as training:
                for loop in self._loops.values():
                    training.create_task(self._train(loop), name=f"train-{loop.policy}")
            # Behind the last step of all: a policy that ends first is not judged beside partners that go on learning.
            self._order_final_evaluations()
            self._orders.put_nowait(None)
            if self._stop.is_set():
                await self._production.park()
            else:
                self._production.end()
            for task in work:
                task.cancel()
            if self._stop.is_set():
                evaluate.cancel()
            await asyncio.wait([evaluate])
            for task in service:
                task.cancel()

    async def _train(self, loop: PolicyLoop) -> None:
        """Train one policy, and save it behind its last step.

        Waits for: its steps. Unblocked by: their end, or a request to stop.
        """
        await loop.train(self._on_step)
        await self._checkpoint(loop)

    async def _on_step(self, loop: PolicyLoop) -> None:
        """Checkpoint a policy and order its evaluation when due."""
        step, evaluation = loop.version.step, self._config.evaluation_of(loop.policy)
        interval = evaluation.interval_steps
        if interval and step % interval == 0 and step < self._config.steps:
            self._order_evaluation(loop, evaluation.tasks)
        if step % self._config.checkpoint.interval_steps == 0:
            await self._checkpoint(loop)

    async def _evaluate(self) -> None:
        """Evaluate the ordered versions, one after the other, on engines of their own.

        Waits for: orders. Unblocked by: the training loops; None comes behind the last.
        """
        while (order := await self._orders.get()) is not None:
            evaluator = self._parts.evaluator
            assert evaluator is not None
            for policy, manifest in order.manifests.items():
                await evaluator.load(manifest)
                self._loops[policy].pinned.remove(manifest.path)
            name = f"{order.policy}/evaluation {order.version}"
            with self._parts.traces.during(SpanKind.EVALUATION, name, name, tasks=order.num_tasks):
                evaluation = await evaluator.run(order.policy, order.version, order.num_tasks)
            self._evaluations.append(evaluation)
            await self._recorder.record_evaluation(evaluation)

    def _order_final_evaluations(self) -> None:
        for loop in self._loops.values():
            self._order_evaluation(loop, self._config.evaluation_of(loop.policy).final_tasks)

    def _order_evaluation(self, loop: PolicyLoop, num_tasks: int) -> None:
        if num_tasks == 0 or not self._config.is_evaluated(loop.policy):
            return
        manifests = {name: other.staged for name, other in self._loops.items() if other.staged is not None}
        for policy, manifest in manifests.items():
            self._loops[policy].pinned.append(manifest.path)
        self._orders.put_nowait(_EvaluationOrder(loop.policy, loop.version, manifests, num_tasks))

    async def _checkpoint(self, loop: PolicyLoop) -> None:
        """Save a policy's trainer, and the tasks that the checkpoints of all policies hold; one after the other.

        Without a step since the last there is nothing new to save.
        """
        async with self._checkpointing:
            if loop.version == self._saved[loop.policy]:
                return
            journal, run = self._parts.journal, self._parts.run
            journal.check()
            folder = run.checkpoint(loop.policy, loop.version.step)
            await self._parts.trainer(loop.policy).save(folder)
            crash_point("checkpoint.saved")
            journal.check()
            versions = {**self._saved, loop.policy: loop.version}
            steps = {policy: version.step for policy, version in versions.items()}
            self._buffer.journal.begin_checkpoint()
            frontiers, ledger_bytes = self._buffer.frontiers(steps), self._recorder.finish_ledger(steps)
            crash_point("ledger.written")
            await self._buffer.journal.settled()
            progress = Progress(versions, frontiers, ledger_bytes, journal.ends(), self._num_checkpoints + 1)
            await asyncio.to_thread(run.write_progress, folder, progress)
            crash_point("checkpoint.complete")
            self._saved, self._num_checkpoints = versions, progress.number
            await self._buffer.journal.checkpointed(steps)
            journal.tidy()
            begun_from = self._parts.start.checkpoints.get(loop.policy)
            run.prune_checkpoints(loop.policy, self._config.checkpoint.keep, begun_from)
            self._write_state(RunStatus.RUNNING)

    def _write_state(self, status: RunStatus, message: str = "") -> None:
        """Say how the run stands, unless another process has it by now."""
        if self._parts.journal.is_held:
            files = marks_now(self._parts.run.path, is_at_rest=False)
            self._parts.run.write_state(RunState(status, self.versions(), message, files))

    def _summary(self, status: RunStatus, seconds: float) -> RunSummary:
        return RunSummary(
            run=self._parts.run.path,
            status=status,
            versions=self.versions(),
            evaluations=tuple(self._evaluations),
            seconds=seconds,
            aborted_generations=sum(parts.serving.router.interrupted for parts in self._parts.policies.values()),
            regenerated_requests=sum(parts.serving.router.regenerated for parts in self._parts.policies.values()),
            max_staleness=self._recorder.max_staleness,
            goodput=self._buffer.ledger.goodput(),
        )
