"""The episode buffer: every state in memory, every change that must outlive the process on record first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.buffer.config import BufferConfig
from agentrl.buffer.frontier import FrontierState
from agentrl.buffer.group import Group
from agentrl.buffer.group_ends import GroupEnds
from agentrl.buffer.lane import Lane
from agentrl.buffer.ledger import Ledger
from agentrl.buffer.recovery import Recovered, TakenStep, failure_reason, succeeded
from agentrl.buffer.staleness import build_counted
from agentrl.buffer.starvation import FailuresInRow
from agentrl.buffer.step_journal import NoStepJournal, StepJournal
from agentrl.buffer.task_order import TaskOrder
from agentrl.buffer.tasks import TaskSource
from agentrl.protocols import EpisodeBuffer
from agentrl.types.batch import NO_COLUMNS, CreditColumns, TrainBatch
from agentrl.types.episode import Episode, Ticket
from agentrl.types.errors import CUT_OFF, Failure, StalledError
from agentrl.types.task import Task
from agentrl.types.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class EnvironmentTerms:
    """What the buffer knows of an environment: its share of the groups, and the policies that train on it."""

    weight: float
    policies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BufferTerms:
    """What a run agrees with its buffer.

    `configs` are of the trained policies. `versions` has the one that each policy, frozen ones too, goes on from,
    `places` the episodes that may generate at once, `max_groups` the groups of a policy that may still begin (none
    sets no bound). `columns` has what the credit of each policy wants to know of turns; nothing if it is not named.
    """

    configs: dict[str, BufferConfig]
    environments: dict[str, EnvironmentTerms]
    versions: dict[str, PolicyVersion]
    seed: int
    places: int
    max_attempts: int
    max_consecutive_failures: int
    max_groups: dict[str, int] = field(default_factory=dict)
    columns: dict[str, CreditColumns] = field(default_factory=dict)


class MemoryBuffer(EpisodeBuffer):
    """Episodes from admission to training.

    States of an episode: running (holds a place) -> scoring (place given back) -> finished in its group
    -> ready with its group, for each policy that acted in it -> taken -> trained; or dropped with a reason. It is
    final when all of these policies are done with it. All methods run on one event loop; every change of state
    notifies the waiters of `admit` and `take`.
    """

    def __init__(
        self,
        terms: BufferTerms,
        tasks: TaskSource,
        frontiers: Mapping[str, FrontierState],
        ledger: Ledger,
        journal: StepJournal | None = None,
    ) -> None:
        self._terms, self._tasks, self.ledger = terms, tasks, ledger
        self._order = TaskOrder({name: section.weight for name, section in terms.environments.items()}, frontiers)
        self.journal: StepJournal = journal or NoStepJournal()
        self._lanes = {
            name: Lane(name, config, terms.versions[name], terms.max_groups.get(name), self._order.number)
            for name, config in terms.configs.items()
        }
        self._ends = GroupEnds(self._lanes, self.journal, ledger, self._order)
        self._config = next(iter(terms.configs.values()))
        self._loaded = dict(terms.versions)
        self._groups: dict[int, Group] = {}
        self._running: dict[str, Ticket] = {}
        self._failures = FailuresInRow(terms.max_consecutive_failures, set(terms.environments))
        self._last_failure: Failure | None = None
        self._resumed: set[str] = set()
        self.num_unforked = 0
        """Members that were to go on from another's state, and began at the start since there was none."""
        self._changed = asyncio.Condition()
        self._fatal: StalledError | None = None
        tasks.listen(self._notify)

    @property
    def num_running(self) -> int:
        """Episodes that hold a place."""
        return len(self._running)

    def loaded_version(self, policy: str) -> PolicyVersion:
        """The version of a trained policy that engines were last proven to serve."""
        return self._lanes[policy].loaded

    def num_ready(self, policy: str) -> int:
        """Episodes of complete groups that no step of the policy has taken."""
        return sum(len(group.episodes) for group in self._lanes[policy].ready)

    def num_accepted(self, policy: str) -> int:
        """Episodes that gave their place back and are part of a step of the policy, or may yet be."""
        return self._lanes[policy].accepted

    def frontiers(self, checkpoint: Mapping[str, int]) -> dict[str, FrontierState]:
        """Tasks that are done by environment, for a checkpoint that has these steps of the policies."""
        return self._order.at_checkpoint(checkpoint)

    def restore(self, recovered: Recovered) -> None:
        """Go on from what a journal holds; steps that it took are redone with `retake`.

        Groups that were complete are ready again, members in flight hold their places.
        """
        self._order.finish(entry.group for entry, _ in recovered.dropped)
        for episode, step in recovered.failed:
            self.ledger.dropped(episode, failure_reason(episode), step)
        for entry, episodes in recovered.dropped:
            for episode in episodes:
                self.ledger.dropped(episode, entry.reason, entry.step)
        for ticket in recovered.running:
            self._take_place(ticket)
            self._resumed.add(ticket.episode_id)
        for episode in recovered.unscored:
            self._take_place(episode.ticket)
            self._give_place_back(episode.ticket)
        redone = {policy: {g.number for step in steps for g in step.groups} for policy, steps in recovered.redo.items()}
        for policy, steps in recovered.redo.items():
            self._lanes[policy].accepted += sum(group.size for step in steps for group in step.groups)
        for group in recovered.groups:
            waiting = [policy for policy in group.waits_for if group.number not in redone.get(policy, ())]
            self._restore_group(group, waiting, recovered.trained.get(group.number, {}))

    def _restore_group(self, group: Group, waiting: Sequence[str], trained: Mapping[str, PolicyVersion]) -> None:
        """Go on with a group that these policies are still to take, and these have trained at their versions."""
        self._order.hold(group.number)
        for policy, version in trained.items():
            group.count_trained(build_counted([group], policy, version, self._lanes[policy].config)[1])
        for policy in waiting:
            self._lanes[policy].accepted += group.num_counted
        if not group.is_complete:
            self._groups[group.number] = group
        elif group.waits_for:
            self._complete(group, waiting)
        else:
            self._ends.end(group)

    async def retake(self, step: TakenStep) -> TrainBatch:
        """The batch of a step that is on record, as it took it."""
        return await self._build(self._lanes[step.policy], step.version, step.groups)

    async def admit(self) -> Ticket:
        """Leave to start the next episode.

        Waits for: a free place within every policy's staleness bound, and a task, or for a fork its parent. Unblocked
        by: release, loaded, settle, finish, or the arrival of tasks.
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
                self._failures.end_row(group.environment)
                group.episodes.append(episode)
            else:
                self._fail(group, episode)
            if group.is_complete:
                del self._groups[group.number]
                self._complete(group, group.policies)
            self._changed.notify_all()
            if self._fatal is not None:
                raise self._fatal

    async def take(self, policy: str, version: PolicyVersion) -> TrainBatch:
        """The policy's oldest complete groups as one batch for the step at this version.

        Waits for: groups_per_step complete groups that the order and the staleness policy let go. Unblocked by:
        settle, or the deadline. The batch is built by a thread, while episodes go on.

        Raises:
            StalledError: nothing came in time, the filter leaves nothing, or episodes only fail; says which.
        """
        lane, step = self._lanes[policy], version.step

        def may_go_on() -> bool:
            return self._fatal is not None or bool(self._next_groups(lane, step))

        async with self._changed:
            try:
                async with asyncio.timeout(lane.config.stall_s):
                    await self._changed.wait_for(may_go_on)
            except TimeoutError:
                raise StalledError(self._describe_stall(lane, step)) from None
            if self._fatal is not None:
                raise self._fatal
            groups = self._next_groups(lane, step)
            lane.dropped.begin_step()
            lane.ready = [group for group in lane.ready if group not in groups]
        await self.journal.taken(policy, version, groups)
        return await self._build(lane, version, groups)

    async def trained(self, policy: str, version: PolicyVersion) -> None:
        """The taken batch is part of this version."""
        lane = self._lanes[policy]
        for group in lane.taken:
            self._ends.trained(group, policy, version.step)
        lane.taken = []

    async def loaded(self, policy: str, version: PolicyVersion) -> None:
        """Engines serve this version now."""
        async with self._changed:
            self._loaded[policy] = version
            if policy in self._lanes:
                self._lanes[policy].loaded = version
            self._changed.notify_all()

    async def finish(self, policy: str) -> None:
        """The policy has made its last step: the others go on without it."""
        lane = self._lanes[policy]
        async with self._changed:
            lane.is_over = True
            # The last policy leaves its groups to the end of the run, which writes them off unless it is resumed.
            left, lane.ready = (lane.ready, []) if self._open_lanes(self._lanes) else ([], lane.ready)
            for group in left:
                self._ends.leave_out(group, {policy: "run_ended"})
            self._changed.notify_all()

    def unsettled(self) -> list[Ticket]:
        """Episodes that were dispatched and have not come to an end here."""
        settled = {episode.episode_id for group in self._unfinished() for episode in group.episodes}
        return [ticket for ticket in self.ledger.in_flight if ticket.episode_id not in settled]

    def close(self, played: Mapping[str, Episode]) -> None:
        """Write off what can no longer be trained, at the end of a run that is not to be resumed.

        `played` are unsettled episodes by name, as far as they are known.
        """
        step = min((lane.loaded.step for lane in self._lanes.values()), default=0)
        for group in self._unfinished():
            self._ends.write(group, "run_ended", step)
        for lane in self._lanes.values():
            lane.taken, lane.ready = [], []
        self._groups.clear()
        self.ledger.write_off("run_ended", step, played)

    def _unfinished(self) -> list[Group]:
        """Groups that are still in the buffer, whole or not."""
        waiting = [group for lane in self._lanes.values() for group in (*lane.taken, *lane.ready)]
        return list({group.number: group for group in (*waiting, *self._groups.values())}.values())

    async def _build(self, lane: Lane, version: PolicyVersion, groups: Sequence[Group]) -> TrainBatch:
        """What a lane takes, as a batch, which a thread builds: episodes go on meanwhile."""
        columns = self._terms.columns.get(lane.policy, NO_COLUMNS)
        batch, tokens = await asyncio.to_thread(build_counted, groups, lane.policy, version, lane.config, columns)
        for group in groups:
            group.count_trained(tokens)
        lane.taken += groups
        return batch

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _open_lanes(self, policies: Iterable[str]) -> list[Lane]:
        return [lane for policy in policies if not (lane := self._lanes[policy]).is_over]

    def _may_admit(self) -> bool:
        return self._next_member() is not None or self._next_task() is not None

    def _admits(self, policies: Iterable[str], reserved: Mapping[str, int] | None = None) -> bool:
        """Whether the bounds of all these policies, at least one of which goes on, leave room for an episode."""
        lanes, kept, running = self._open_lanes(policies), reserved or {}, len(self._running)
        return bool(lanes) and all(
            lane.admissible(self._terms.places, running, kept.get(lane.policy, 0)) > 0 for lane in lanes
        )

    def _next_member(self) -> Group | None:
        """The oldest group that wants a member dispatched and may have it."""
        return next((g for g in self._groups.values() if g.wants_dispatch and self._admits(g.policies)), None)

    def _next_task(self) -> tuple[str, Task] | None:
        """Environment and task of the next group in the mix of those environments that may begin one.

        A task that is on its way is waited for: passed over, its environment would lose its share to the others.
        """
        may_begin = [name for name, terms in self._terms.environments.items() if self._may_begin(terms.policies)]
        found = self._order.next_of(may_begin)
        task = self._tasks.get(*found) if found is not None else None
        return (found[0], task) if found is not None and task is not None else None

    def _may_begin(self, policies: Iterable[str]) -> bool:
        # Forks wait for their parents and take no places meanwhile: new groups must leave them their room in the bound,
        # or no group could be complete.
        kept = {policy: self._num_waiting_forks(policy) for policy in policies} if self._config.forks else None
        return self._admits(policies, kept) and all(lane.groups_left != 0 for lane in self._open_lanes(policies))

    def _num_waiting_forks(self, policy: str) -> int:
        return sum(group.num_waiting_forks for group in self._groups.values() if policy in group.policies)

    def _dispatch(self) -> Ticket:
        group = self._next_member() or self._open_group()
        member, attempt = group.next_member()
        ticket = group.ticket(member, attempt, self._terms.seed, self._loaded)
        self.num_unforked += group.is_fork(member) and ticket.fork is None
        self._take_place(ticket)
        return ticket

    def _take_place(self, ticket: Ticket) -> None:
        self._running[ticket.episode_id] = ticket
        for policy in self._terms.environments[ticket.environment].policies:
            self._lanes[policy].running += 1
        self.ledger.dispatched(ticket)

    def _open_group(self) -> Group:
        found = self._next_task()
        assert found is not None
        name, task = found
        number = self._order.begin(name)
        lanes = self._open_lanes(self._terms.environments[name].policies)
        for lane in lanes:
            lane.groups_left = None if lane.groups_left is None else lane.groups_left - 1
        started = {lane.policy: lane.loaded.step for lane in lanes}
        config = self._config
        group = Group(number, task, config.group_size, started, name, forks=config.forks, waits_for=set(started))
        self._groups[number] = group
        return group

    def _give_place_back(self, ticket: Ticket) -> None:
        if self._running.pop(ticket.episode_id, None) is not None:
            for policy in self._terms.environments[ticket.environment].policies:
                self._lanes[policy].running -= 1
                self._lanes[policy].accepted += 1

    def _fail(self, group: Group, episode: Episode) -> None:
        """Count a failed episode, and let its member try again, in its place, if attempts are left."""
        self._last_failure = episode.failure
        reason = group.failed[episode.episode_id] = failure_reason(episode)
        self.ledger.dropped(episode, reason, group.started_step)
        if episode.ticket.attempt + 1 < self._terms.max_attempts:
            for policy in group.policies:
                self._lanes[policy].accepted -= 1
            group.redispatch.append((episode.ticket.member, episode.ticket.attempt + 1))
        # What a stop of the run or the loss of a worker has ended does not say that something does not work.
        is_cut_off = episode.failure is not None and episode.failure.kind == CUT_OFF
        if not is_cut_off and episode.episode_id not in self._resumed:
            self._fatal = self._fatal or self._failures.add(group.environment, episode.failure)

    def _complete(self, group: Group, policies: Iterable[str]) -> None:
        error = self._ends.complete(group, policies, self._last_failure)
        self._fatal = self._fatal or error

    def _next_groups(self, lane: Lane, step: int) -> list[Group]:
        begun = {name: self._order.num_begun(name) for name in self._environments_of(lane)}
        return lane.next_groups(step, self._groups.values(), begun)

    def _environments_of(self, lane: Lane) -> list[str]:
        return [name for name, terms in self._terms.environments.items() if lane.policy in terms.policies]

    def _describe_stall(self, lane: Lane, step: int) -> str:
        names, groups = self._environments_of(lane), self._groups.values()
        return lane.describe_stall(step, names, groups, self.num_running, self._last_failure)
