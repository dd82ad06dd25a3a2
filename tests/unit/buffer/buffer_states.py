"""An explicit model of the episode buffer, and the machine that compares the two after every event."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from agentrl.buffer.config import BufferConfig
from agentrl.buffer.episode_buffer import BufferTerms, EnvironmentTerms, MemoryBuffer
from agentrl.buffer.frontier import FrontierState
from agentrl.buffer.ledger import Ledger, LedgerLine
from agentrl.testing.builders import InstantTasks, build_episode
from agentrl.types.batch import TrainBatch
from agentrl.types.episode import Episode, Node, Ticket
from agentrl.types.task import Split, Task
from agentrl.types.version import PolicyVersion, VersionSpan


def make_buffer(
    config: BufferConfig, lines: list[LedgerLine], places: int = 64, attempts: int = 1, failures: int = 1000, **options
) -> MemoryBuffer:
    """A buffer of one policy, main, and one environment, fake."""
    max_groups = options.pop("max_groups", None)
    terms = BufferTerms(
        configs={"main": config},
        environments={"fake": EnvironmentTerms(1.0, ("main",))},
        versions={"main": PolicyVersion(0, options.pop("step", 0))},
        seed=0,
        places=places,
        max_attempts=attempts,
        max_consecutive_failures=failures,
        max_groups={} if max_groups is None else {"main": max_groups},
    )
    sample_task = options.pop("sample_task", lambda ordinal: Task("fake", Split.TRAIN, ordinal))
    frontiers = {"fake": options.pop("frontier", FrontierState())}
    return MemoryBuffer(terms, InstantTasks(sample_task), frontiers, Ledger(lines.append), **options)


def frontier_of(buffer: MemoryBuffer, step: int) -> FrontierState:
    """What a checkpoint of this step keeps."""
    return buffer.frontiers({"main": step})["fake"]


def configs(
    windows_beyond_step: list[int | None], bounds: Sequence[int | str] = (1, 2, 0), forks: Sequence[int] = (0,)
) -> st.SearchStrategy[BufferConfig]:
    """Small buffers of every kind; the window of their order is given as groups beyond a step, forks beyond members."""
    return st.builds(
        _make_config,
        num_played=st.integers(1, 3),
        forks=st.sampled_from(forks),
        groups_per_step=st.integers(1, 2),
        max_staleness=st.sampled_from(bounds),
        staleness=st.sampled_from(["mask_spans", "wait", "withhold"]),
        group_filter=st.sampled_from(["none", "spread"]),
        window_beyond_step=st.sampled_from(windows_beyond_step),
    )


def _make_config(
    num_played: int, forks: int, groups_per_step: int, group_filter: str, window_beyond_step: int | None, **options: Any
) -> BufferConfig:
    group_size = num_played + forks
    return BufferConfig(
        group_size=group_size,
        forks=forks,
        groups_per_step=groups_per_step,
        order_window=None if window_beyond_step is None else groups_per_step + window_beyond_step,
        group_filter=group_filter if group_size > 1 else "none",
        **options,
    )


def at(step: int) -> tuple[str, PolicyVersion]:
    """The one policy and a version of it."""
    return "main", PolicyVersion(0, step)


async def attempt(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a call that must not wait; None if it would."""
    task = asyncio.ensure_future(work)
    for _ in range(6):
        await asyncio.sleep(0)
    if task.done():
        return task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return None


@dataclass
class ModelGroup:
    """What a reader of the documentation expects of one group."""

    size: int
    forks: int = 0
    in_flight: dict[str, Ticket] = field(default_factory=dict)
    retries: list[int] = field(default_factory=list)  # members that failed and may try again
    num_members: int = 0
    good: list[Episode] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)  # members that failed for good

    @property
    def waiting_for_retry(self) -> int:
        return len(self.retries)

    @property
    def waiting(self) -> list[int]:
        """Members that are to be dispatched."""
        return [*self.retries, *range(self.num_members, self.size)]

    @property
    def waiting_forks(self) -> list[int]:
        return [member for member in self.waiting if self.is_fork(member)]

    def is_fork(self, member: int) -> bool:
        return member >= self.size - self.forks

    @property
    def is_parent_decided(self) -> bool:
        """Whether the first member that is not lost has ended well, or all that could be parents are lost."""
        good = {episode.ticket.member for episode in self.good}
        first = next((m for m in range(self.size - self.forks) if m not in self.lost), None)
        return first is None or first in good

    @property
    def parent(self) -> Episode | None:
        played = [e for e in self.good if not self.is_fork(e.ticket.member)]
        return min(played, key=lambda episode: episode.ticket.member, default=None)

    @property
    def may_dispatch(self) -> bool:
        return any(self.is_parent_decided or not self.is_fork(member) for member in self.waiting)

    def check_fork(self, ticket: Ticket) -> None:
        """Forks go on from the parent behind one of its turns but for the last, all from the same."""
        parent = self.parent if self.is_fork(ticket.member) else None
        if parent is None or not any(turn.environment_s for turn in parent.turns):
            assert ticket.fork is None
            return
        assert ticket.fork is not None
        assert ticket.fork.parent == parent.episode_id
        assert ticket.fork.turn in range(len(parent.turns) - 1)
        others = [t.fork for t in (*self.in_flight.values(), *(e.ticket for e in self.good)) if self.is_fork(t.member)]
        assert set(others) <= {ticket.fork}

    @property
    def num_counted(self) -> int:
        """Members that take up the staleness bound: all that were dispatched and do not wait for a retry."""
        return self.num_members - self.waiting_for_retry

    @property
    def is_complete(self) -> bool:
        return self.num_members == self.size and not self.in_flight and not self.waiting_for_retry


@dataclass
class BufferModel:
    """Counts everything anew from the groups instead of keeping counters."""

    config: BufferConfig
    places: int
    attempts: int
    version: int = 0
    loaded: int = 0
    groups: dict[int, ModelGroup] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    dispatched: list[str] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    num_taken: int = 0

    @property
    def num_counted(self) -> int:
        return self.num_taken * self.config.group_size + sum(g.num_counted for g in self.groups.values())

    @property
    def bound(self) -> float:
        if self.config.max_staleness == "unbounded":
            return math.inf
        return (self.config.max_staleness + self.loaded + 1) * self.config.episodes_per_step

    @property
    def in_flight(self) -> dict[str, Ticket]:
        return {name: ticket for g in self.groups.values() for name, ticket in g.in_flight.items()}

    def may_admit(self) -> bool:
        """Forks that wait for their parents take no room from members, but new groups leave them theirs."""
        if len(self.running) >= self.places:
            return False
        if any(group.may_dispatch for group in self.groups.values()):
            return self.num_counted < self.bound
        return self.num_counted + sum(len(group.waiting_forks) for group in self.groups.values()) < self.bound

    def admit(self, ticket: Ticket) -> None:
        group = self.groups.setdefault(ticket.group, ModelGroup(self.config.group_size, self.config.forks))
        assert group.is_parent_decided or not group.is_fork(ticket.member)
        group.check_fork(ticket)
        if ticket.attempt:
            group.retries.remove(ticket.member)
        else:
            assert ticket.member == group.num_members
            group.num_members += 1
        group.in_flight[ticket.episode_id] = ticket
        self.running.add(ticket.episode_id)
        self.dispatched.append(ticket.episode_id)

    def settle(self, ticket: Ticket, episode: Episode | None) -> None:
        group = self.groups[ticket.group]
        del group.in_flight[ticket.episode_id]
        self.running.discard(ticket.episode_id)
        if episode is not None:
            group.good.append(episode)
        else:
            self.failed.add(ticket.episode_id)
            if ticket.attempt + 1 < self.attempts:
                group.retries.append(ticket.member)
            else:
                group.lost.add(ticket.member)
        if group.is_complete and not self.may_train(group):
            del self.groups[ticket.group]

    def may_train(self, group: ModelGroup) -> bool:
        if len(group.good) < min(2, group.size):
            return False
        forks = [episode.reward for episode in group.good if episode.ticket.fork is not None]
        others = [episode.reward for episode in group.good if episode.ticket.fork is None]
        return self.config.group_filter == "none" or len(set(forks)) > 1 or len(set(others)) > 1

    def may_take(self) -> bool:
        """Whether enough groups are ready that are not too young, staleness apart."""
        complete = sorted(number for number, group in self.groups.items() if group.is_complete)
        step = complete[: self.config.groups_per_step]
        return len(step) == self.config.groups_per_step and self._is_in_order(step)

    def _is_in_order(self, numbers: Collection[int]) -> bool:
        """No group of a step is `order_window` or more behind one that is still on its way."""
        window = self.config.order_window
        on_their_way = [number for number, group in self.groups.items() if not group.is_complete]
        return window is None or all(young - slow < window for young in numbers for slow in on_their_way)

    def take(self, batch: TrainBatch) -> None:
        """Remove what was taken, and check that it is legal to train it."""
        episodes = {e.episode_id: (n, e) for n, g in self.groups.items() if g.is_complete for e in g.good}
        numbers = {episodes[entry.episode_id][0] for entry in batch.episodes}
        assert len(numbers) == self.config.groups_per_step
        assert self._is_in_order(numbers)
        assert len(batch.episodes) == sum(len(self.groups[number].good) for number in numbers)
        for entry in batch.episodes:
            episode = episodes[entry.episode_id][1]
            assert entry.reward == episode.reward
            is_withheld = self.config.staleness == "withhold" and self._is_stale(episode)
            assert len(entry.trajectories) == (0 if is_withheld else 1)
            for view in entry.trajectories:
                self._check_mask(view.loss_mask, episode)
        for number in numbers:
            del self.groups[number]
        self.num_taken += len(numbers)
        self.version += 1

    def _is_stale(self, episode: Episode) -> bool:
        own = [node for node in episode.nodes if node.sample is not None and not _is_pinned(node, episode)]
        spans = [span for node in own if node.sample is not None for span in node.sample.versions]
        return any(self._is_old(span) for span in spans)

    def _is_old(self, span: VersionSpan) -> bool:
        bound = self.config.max_staleness
        return bound != "unbounded" and self.version - span.version.step > bound

    def _check_mask(self, mask: Any, episode: Episode) -> None:
        """Exactly its own tokens that are fresh enough are trained; under ``wait`` that is every one of them."""
        expected: list[bool] = []
        for node in episode.nodes:
            fresh = node.sample is not None and not any(map(self._is_old, node.sample.versions))
            expected += [fresh and not _is_pinned(node, episode)] * len(node.token_ids)
        assert mask.tolist() == expected
        if self.config.staleness == "wait":
            assert int(mask.sum()) == episode.num_sampled_tokens


def _is_pinned(node: Node, episode: Episode) -> bool:
    return episode.ticket.fork is not None and node.turn <= episode.ticket.fork.turn


def good_episode(ticket: Ticket, reward: float, middle: int, loaded: int) -> Episode:
    """Three replies: by the version at admission, by one between, by the one that is loaded now.

    In every third group the environment answers none of them, so that nothing can be forked.
    """
    start = ticket.started_at["main"].step
    episode = build_episode(ticket, [(3, start), (2, min(start + middle, loaded)), (1, loaded)], reward)
    answered_s = float(ticket.group % 3 != 2)
    return replace(episode, turns=tuple(replace(turn, environment_s=answered_s) for turn in episode.turns))
