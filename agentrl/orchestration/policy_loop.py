"""The loops of one trained policy: take a batch, step, stage; bring the newest weights to its engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from agentrl.buffer.starvation import UntrainedSteps
from agentrl.orchestration.assembly import RunParts
from agentrl.orchestration.redo import Redo, weights_digest
from agentrl.orchestration.shutdown import result_or_stopped
from agentrl.process.crash_points import crash_point
from agentrl.telemetry.spans import SpanKind
from agentrl.types.batch import Receipt, TrainBatch, WeightsManifest
from agentrl.types.errors import StalledError
from agentrl.types.version import PolicyVersion


class PolicyLoop:
    """Trains and publishes one policy, at its own pace.

    Invariant: `version` is the trainer's; engines serve it or an older one. `staged` are the newest weights that
    engines may have, None before the first step. Two slots tie the loops together: the newest staged weights, which
    the publishing loop takes, and `on_step`, by which the controller makes checkpoints and orders evaluations.
    """

    def __init__(self, parts: RunParts, policy: str, stop: asyncio.Event) -> None:
        self.policy, self._parts, self._stop = policy, parts, stop
        self._config, self._buffer, self._recorder = parts.config, parts.buffer, parts.recorder
        self._trainer = parts.trainer(policy)
        self._snapshots = [snapshot for snapshot in parts.snapshots if snapshot.config.policy == policy]
        self._untrained = UntrainedSteps(parts.config.buffer_of(policy))
        self._has_staged = asyncio.Event()
        self.version = parts.start.versions[policy]
        self.staged: WeightsManifest | None = None
        self.pinned: list[str] = []
        """Staged weights that evaluations still need, once for each that does."""

    async def redo(self) -> None:
        """Do the steps again that are on record behind the checkpoint. Raises TrainerError or StorageError."""
        redo = Redo(self._parts, self.policy)
        await redo.run()
        self.version, self.staged = redo.version, redo.staged

    async def train(self, on_step: Callable[[PolicyLoop], Awaitable[None]]) -> None:
        """Take, step, stage, until the last step or a request to stop.

        Waits for: a batch. Unblocked by: the buffer, its stall deadline, or a request to stop.
        """
        while self.version.step < self._config.steps and not self._stop.is_set():
            waited_from = time.monotonic()
            batch = await result_or_stopped(self._buffer.take(self.policy, self.version), self._stop)
            if batch is None:
                return
            crash_point("batch.taken")
            taken = time.monotonic()
            waited_s = taken - waited_from
            self._check_has_tokens(batch)
            report = await self._trainer.step(batch)
            stepped = time.monotonic()
            crash_point("step.done")
            self.version = report.version
            await self._buffer.trained(self.policy, report.version)
            await self._stage(report.version)
            self._trace_step(batch, (waited_from, taken, stepped, time.monotonic()))
            counted = self._parts.counted(self.policy)
            self._recorder.record_step(self.policy, report, batch, self._buffer, waited_s, counted)
            await on_step(self)
        if self.version.step >= self._config.steps:
            await self._buffer.finish(self.policy)

    async def publish(self) -> None:
        """Bring the newest staged weights to the engines, again and again.

        Waits for: staged weights. Unblocked by: the training loop, or cancellation.
        """
        while True:
            await self._has_staged.wait()
            self._has_staged.clear()
            manifest = self.staged
            assert manifest is not None
            self._parts.journal.check()
            crash_point("publish.begun")
            serving, began = self._parts.policies[self.policy].serving, time.monotonic()
            receipts = await serving.publisher.publish(manifest)
            self._trace_publication(manifest.version, began, receipts)
            crash_point("publish.done")
            self._recorder.record_publish(self.policy, list(receipts))
            await self._buffer.loaded(self.policy, manifest.version)
            for snapshot in self._snapshots:
                snapshot.published(manifest)
            self._prune()

    def _trace_step(self, batch: TrainBatch, moments: tuple[float, float, float, float]) -> None:
        """A step's spans: it waited for its batch, the trainer made the step, and the weights were staged."""
        traces, trace = self._parts.traces, f"{self.policy}/step {self.version}"
        waited_from, taken, stepped, staged = moments
        tokens = batch.num_trained_tokens
        traces.add(SpanKind.STEP, trace, trace, waited_from, staged, policy=self.policy, tokens=tokens)
        traces.add(SpanKind.QUEUE, "wait_for_batch", trace, waited_from, taken)
        traces.add(SpanKind.STEP, "train", trace, taken, stepped)
        traces.add(SpanKind.STEP, "stage", trace, stepped, staged)
        traces.taken((e.episode_id for e in batch.episodes), self.policy, self.version.step, taken)

    def _trace_publication(self, version: PolicyVersion, began: float, receipts: Sequence[Receipt]) -> None:
        """A publication's spans: all of it, and each engine's standing still within."""
        traces, trace = self._parts.traces, f"{self.policy}/publish {version}"
        ended, fleet = time.monotonic(), self._parts.policies[self.policy].serving.fleet
        traces.add(SpanKind.PUBLISH, trace, trace, began, ended, policy=self.policy, engines=len(receipts))
        for name, member in fleet.members.items():
            for stretch in member.stood_still(began, ended):
                traces.add(SpanKind.PUBLISH, f"pause {name}", trace, *stretch)

    def _check_has_tokens(self, batch: TrainBatch) -> None:
        """Without a token to train the version would rise for ever, without a word. Raises StalledError."""
        if any(episode.trajectories for episode in batch.episodes) and not batch.num_sampled_tokens:
            raise StalledError(
                f"no episode of the step after version {batch.version} has a sampled token: the first prompts do not "
                f"fit into {self._context_limits()}; raise it"
            )
        if (error := self._untrained.add(batch)) is not None:
            raise error

    def _context_limits(self) -> str:
        """Where the recipe bounds the contexts of the policy's agents, and by how many tokens."""
        config, own = self._config, self._config.policies[self.policy].limits
        played = config.played_by(self.policy)
        bounds = {f"environments.{n}.limits" if config.environments[n].limits else "rollout.limits": n for n in played}
        limits = {name: config.limits_of(environment) for name, environment in bounds.items()}
        if own is not None:
            limits = {f"policies.{self.policy}.limits": own}
        return " and ".join(f"{name}.max_context_tokens = {bound.max_context_tokens}" for name, bound in limits.items())

    async def _stage(self, version: PolicyVersion) -> None:
        """Stage the new weights; nobody sees them before the step is on record."""
        manifest = await self._trainer.stage(version, self._parts.run.weights(self.policy, version))
        crash_point("weights.staged")
        await self._buffer.journal.stepped(self.policy, version, weights_digest(manifest))
        crash_point("step.recorded")
        self.staged = manifest
        self._has_staged.set()

    def _prune(self) -> None:
        newest = {self.staged.path} if self.staged is not None else set()
        keep = self._config.policies[self.policy].publish.keep_versions
        taught = {path for snapshot in self._snapshots for path in snapshot.pinned}
        self._parts.run.prune_weights(self.policy, keep, newest | taught | set(self.pinned))
