"""The episode buffer: every state in memory, every change that must outlive the process on record first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from agentrl.buffer.admission import admissible
from agentrl.buffer.config import BufferConfig
from agentrl.buffer.frontier import Frontier, FrontierState
from agentrl.buffer.group import Group
from agentrl.buffer.journal import NoStepJournal, StepJournal
from agentrl.buffer.ledger import Ledger
from agentrl.buffer.order import oldest_in_window
from agentrl.buffer.recovery import Recovered, TakenStep, failure_reason, succeeded
from agentrl.buffer.staleness import build_batch, count_trained, wait_permits
from agentrl.buffer.starvation import DroppedGroups
from agentrl.protocols import EpisodeBuffer
from agentrl.types.batch import TrainBatch
from agentrl.types.episode import Episode, Ticket
from agentrl.types.errors import Failure, StalledError
from agentrl.types.task import Task
from agentrl.types.version import PolicyVersion


class MemoryBuffer(EpisodeBuffer):
    """Episodes from admission to training.

    States of an episode: running (holds a place) -> scoring (place given back) -> finished in its group
    -> ready with its group -> taken -> trained; or dropped with a reason. All methods run on one event
    loop; every change of state notifies the waiters of `admit` and `take`.
    """

    def __init__(
        self,
        config: BufferConfig,
        places: int,
        max_attempts: int,
        max_consecutive_failures: int,
        sample_task: Callable[[int], Task],
        seed: int,
        versions: Mapping[str, PolicyVersion],
        frontier: FrontierState,
        ledger: Ledger,
        max_groups: int | None = None,
        journal: StepJournal | None = None,
    ) -> None:
        self._config, self._places = config, places
        self._max_attempts, self._max_failures = max_attempts, max_consecutive_failures
        self._sample_task, self._seed = sample_task, seed
        self._loaded = dict(versions)
        self._frontier = Frontier.restore(frontier)
        self.ledger = ledger
        self.journal: StepJournal = journal or NoStepJournal()
        self._groups_left = max_groups
        self._groups: dict[int, Group] = {}
        self._ready: list[Group] = []
        self._taken: list[tuple[Group, dict[str, int]]] = []
        self._running: set[str] = set()
        self._accepted = min(v.step for v in versions.values()) * config.episodes_per_step
        self._failures_in_row = 0
        self._dropped = DroppedGroups(config.max_filtered_groups)
        self._last_failure: Failure | None = None
        self._changed = asyncio.Condition()
        self._fatal: StalledError | None = None

    @property
    def num_running(self) -> int:
        """Episodes that hold a place."""
        return len(self._running)

    @property
    def num_ready(self) -> int:
        """Episodes of complete groups that no step has taken."""
        return sum(len(group.episodes) for group in self._ready)

    def frontier(self) -> FrontierState:
        """Tasks that are done, for the checkpoint."""
        return self._frontier.state()

    def restore(self, recovered: Recovered) -> None:
        """Go on from what a journal holds; steps that it took are redone with `retake`.

        Groups that were complete are ready again, members in flight hold their places.
        """
        self._frontier.finish(entry.group for entry, _ in recovered.dropped)
        self._frontier.hold(group.number for step in recovered.redo for group in step.groups)
        for episode, step in recovered.failed:
            self.ledger.dropped(episode, failure_reason(episode), step)
        for entry, episodes in recovered.dropped:
            for episode in episodes:
                self.ledger.dropped(episode, entry.reason, entry.step)
        self._accepted += sum(group.size for step in recovered.redo for group in step.groups)
        for ticket in recovered.running:
            self._running.add(ticket.episode_id)
            self.ledger.dispatched(ticket)
        for group in recovered.groups:
            self._frontier.hold([group.number])
            self._groups[group.number] = group
            self._accepted += group.num_dispatched - len(group.in_flight) - len(group.redispatch)
        for group in recovered.groups:
            if group.is_complete:
                self._complete(group)

    def retake(self, step: TakenStep) -> dict[str, TrainBatch]:
        """The batches of a step that is on record, as it took them."""
        return self._take(list(step.groups), step.versions)

    async def admit(self) -> Ticket:
        """Leave to start the next episode.

        Waits for: a free place within the staleness bound. Unblocked by: release, loaded, settle.
        """
        async with self._changed:
            await self._changed.wait_for(self._may_admit)
            return self._dispatch()

    async def release(self, ticket: Ticket) -> None:
        """The episode generates no more; calling again changes nothing."""
        async with self._changed:
            self._give_place_back(ticket)
            self._changed.notify_all()

    async def settle(self, episode: Episode) -> None:
        """The episode is over; calling again changes nothing.

        Raises:
            StalledError: too many episodes failed in a row.
        """
        async with self._changed:
            self._give_place_back(episode.ticket)
            group = self._groups.get(episode.ticket.group)
            if group is None or not group.lands(episode.ticket):
                return
            if succeeded(episode):
                self._failures_in_row = 0
                group.episodes.append(episode)
            else:
                self._fail(group, episode)
            if group.is_complete:
                self._complete(group)
            self._changed.notify_all()
            if self._fatal is not None:
                raise self._fatal

    async def take(self, versions: Mapping[str, PolicyVersion]) -> dict[str, TrainBatch]:
        """The oldest complete groups as one batch for each policy.

        Waits for: groups_per_step complete groups that the order and the staleness policy let go. Unblocked by:
        settle, or the deadline.

        Raises:
            StalledError: nothing came in time, the filter leaves nothing, or episodes only fail; says which.
        """
        step = min(version.step for version in versions.values())
        async with self._changed:
            try:
                async with asyncio.timeout(self._config.stall_s):
                    await self._changed.wait_for(lambda: self._fatal is not None or self._may_take(step))
            except TimeoutError:
                raise StalledError(self._describe_stall(step)) from None
            if self._fatal is not None:
                raise self._fatal
            groups = self._oldest_ready()
            await self.journal.taken(versions, groups)
            self._dropped.begin_step()
            for group in groups:
                self._ready.remove(group)
            return self._take(groups, versions)

    async def trained(self, versions: Mapping[str, PolicyVersion]) -> None:
        """The taken batch is part of these versions."""
        step = min(version.step for version in versions.values())
        for group, tokens in self._taken:
            self._frontier.finish([group.number])
            for episode in group.ordered():
                self.ledger.trained(episode, tokens[episode.episode_id], step)
        self._taken = []

    async def loaded(self, versions: Mapping[str, PolicyVersion]) -> None:
        """Engines serve these versions now."""
        async with self._changed:
            self._loaded.update(versions)
            self._changed.notify_all()

    def close(self) -> None:
        """Write off what can no longer be trained, at the end of a run that is not to be resumed."""
        step = min(version.step for version in self._loaded.values())
        taken = [group for group, _ in self._taken]
        for group in [*taken, *self._ready, *self._groups.values()]:
            for episode in group.episodes:
                self.ledger.dropped(episode, "run_ended", step)
        self._taken = []
        self._ready.clear()
        self._groups.clear()
        self.ledger.write_off("run_ended", step)

    def _take(self, groups: list[Group], versions: Mapping[str, PolicyVersion]) -> dict[str, TrainBatch]:
        batches = {p: build_batch(groups, p, version, self._config) for p, version in versions.items()}
        self._taken += [(group, count_trained(group.episodes, batches.values())) for group in groups]
        return batches

    def _may_admit(self) -> bool:
        has_member = any(group.wants_dispatch for group in self._groups.values())
        if not has_member and self._groups_left == 0:
            return False
        step = min(version.step for version in self._loaded.values())
        config = self._config
        return (
            admissible(
                self._places, len(self._running), self._accepted, step, config.episodes_per_step, config.max_staleness
            )
            > 0
        )

    def _dispatch(self) -> Ticket:
        group = next((g for g in self._groups.values() if g.wants_dispatch), None) or self._open_group()
        member, attempt = group.next_member()
        ticket = group.ticket(member, attempt, self._seed, self._loaded)
        self._running.add(ticket.episode_id)
        self.ledger.dispatched(ticket)
        return ticket

    def _open_group(self) -> Group:
        ordinal = self._frontier.next()
        if self._groups_left is not None:
            self._groups_left -= 1
        started = min(version.step for version in self._loaded.values())
        group = Group(ordinal, self._sample_task(ordinal), self._config.group_size, started)
        self._groups[ordinal] = group
        return group

    def _give_place_back(self, ticket: Ticket) -> None:
        if ticket.episode_id in self._running:
            self._running.remove(ticket.episode_id)
            self._accepted += 1

    def _fail(self, group: Group, episode: Episode) -> None:
        """Count a failed episode, and let its member try again, in its place, if attempts are left."""
        failure = episode.failure
        self._last_failure = failure
        self._failures_in_row += 1
        self.ledger.dropped(episode, failure_reason(episode), group.started_step)
        group.failed.append(episode.episode_id)
        if episode.ticket.attempt + 1 < self._max_attempts:
            self._accepted -= 1
            group.redispatch.append((episode.ticket.member, episode.ticket.attempt + 1))
        if self._failures_in_row >= self._max_failures:
            self._fatal = StalledError(
                f"{self._failures_in_row} episodes failed in a row; the last: {failure or 'no score'}. "
                "The cause is hardly the tasks: look at the logs of that component, then resume the run"
            )

    def _complete(self, group: Group) -> None:
        """Make a complete group ready, or drop it with its reason."""
        del self._groups[group.number]
        reason = self._drop_reason(group)
        if reason is None:
            self._dropped.end_row()
            self._ready.append(group)
            return
        self._accepted -= group.size
        if self._groups_left is not None:
            self._groups_left += 1
        self._frontier.finish([group.number])
        self.journal.dropped(group, [episode.episode_id for episode in group.ordered()], reason)
        for episode in group.episodes:
            self.ledger.dropped(episode, reason, group.started_step)
        self._fatal = self._fatal or self._dropped.add(reason, group.rewards, self._last_failure)

    def _drop_reason(self, group: Group) -> str | None:
        if len(group.episodes) < min(2, group.size):
            return "group_failed"
        if self._config.group_filter == "spread" and not group.has_spread:
            return "no_spread"
        return None

    def _oldest_ready(self) -> list[Group]:
        config, began = self._config, {group.number: group.started_step for group in self._ready}
        numbers = oldest_in_window(began, self._groups, config.groups_per_step, config.order_window)
        return sorted((g for g in self._ready if g.number in numbers), key=lambda group: group.number)

    def _may_take(self, step: int) -> bool:
        config = self._config
        chosen = self._oldest_ready()
        if len(chosen) < config.groups_per_step or config.staleness != "wait":
            return len(chosen) >= config.groups_per_step
        outstanding: dict[int, int] = {}
        for group in [*self._groups.values(), *(g for g in self._ready if g not in chosen)]:
            outstanding[group.started_step] = outstanding.get(group.started_step, 0) + group.size
        return wait_permits(outstanding, step, config.max_staleness, config.episodes_per_step)

    def _describe_stall(self, step: int) -> str:
        return (
            f"step {step} waited {self._config.stall_s:g} s for {self._config.groups_per_step} complete groups: "
            f"{len(self._ready)} are ready, {len(self._groups)} incomplete, {len(self._running)} episodes generate; "
            f"{self._dropped.explain()}; last failure: {self._last_failure or 'none'}. "
            "Look at the engine's log; raise buffer.stall_s if episodes are long"
        )
