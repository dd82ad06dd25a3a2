"""A naive model of the durable buffer: what a reader of the documentation expects, whatever crashed between."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentrl.buffer.config import BufferConfig
from agentrl.buffer.frontier import FrontierState
from agentrl.types.batch import TrainBatch
from agentrl.types.episode import Episode, Ticket


@dataclass
class ModelMember:
    """One member: its ticket while it is played, its episode once it ended well, or the attempt that it waits for."""

    ticket: Ticket | None = None
    episode: Episode | None = None
    next_attempt: int | None = None

    @property
    def is_waiting(self) -> bool:
        return self.next_attempt is not None


@dataclass
class DurableModel:
    """Keeps groups and what became of them, and counts everything anew instead of keeping counters.

    A crash changes nothing in it but for dispatches of which no lease was kept.
    """

    config: BufferConfig
    places: int
    attempts: int
    loaded: int = 0
    groups: dict[int, dict[int, ModelMember]] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    taken: list[Any] = field(default_factory=list)  # by step: the batch as `as_seen` shows it
    open_step: tuple[int, ...] = ()  # numbers of the groups of a step that is taken and not yet trained
    finished: set[int] = field(default_factory=set)

    @property
    def version(self) -> int:
        """The trainer's."""
        return len(self.taken) - bool(self.open_step)

    @property
    def in_flight(self) -> dict[str, Ticket]:
        members = [m for group in self.groups.values() for m in group.values()]
        return {m.ticket.episode_id: m.ticket for m in members if m.ticket is not None}

    @property
    def num_counted(self) -> int:
        """Episodes within the staleness bound: in a step, or of a living group and not waiting for another attempt."""
        living = sum(not m.is_waiting for group in self.groups.values() for m in group.values())
        return len(self.taken) * self.config.episodes_per_step + living

    @property
    def bound(self) -> int:
        return (self.config.max_staleness + self.loaded + 1) * self.config.episodes_per_step

    @property
    def frontier(self) -> FrontierState:
        """All that is done, in the one way to write it."""
        low = next(number for number in range(len(self.finished) + 1) if number not in self.finished)
        return FrontierState(low, tuple(sorted(number for number in self.finished if number > low)))

    def may_admit(self) -> bool:
        return len(self.running) < self.places and self.num_counted < self.bound

    def admit(self, ticket: Ticket) -> None:
        """An unfinished group comes before a new one, and a new one is of the first task that nobody has."""
        wanting = {n for n, group in self.groups.items() if self._wants_dispatch(group)}
        used = self.finished | set(self.groups) | set(self.open_step)
        first_free = next(n for n in range(len(used) + 1) if n not in used)
        assert ticket.group in wanting if wanting else ticket.group == first_free
        assert ticket.task.ordinal == ticket.group
        group = self.groups.setdefault(ticket.group, {})
        member = group.get(ticket.member, ModelMember(next_attempt=0))
        assert ticket.attempt == member.next_attempt, "nobody is dispatched who plays or has ended"
        group[ticket.member] = ModelMember(ticket)
        self.running.add(ticket.episode_id)

    def forget(self, ticket: Ticket) -> None:
        """Nothing of a dispatch outlived the crash: it comes again under the same name."""
        group = self.groups[ticket.group]
        del group[ticket.member]
        if ticket.attempt:
            group[ticket.member] = ModelMember(next_attempt=ticket.attempt)
        if not group:
            del self.groups[ticket.group]

    def settle(self, ticket: Ticket, episode: Episode) -> None:
        """An end; a group that is complete with it and useless is done with."""
        self.running.discard(ticket.episode_id)
        if episode.failure is None and episode.reward is not None:
            end = ModelMember(episode=episode)
        elif ticket.attempt + 1 < self.attempts:
            end = ModelMember(next_attempt=ticket.attempt + 1)
        else:
            end = ModelMember()
        group = self.groups[ticket.group]
        group[ticket.member] = end
        if self._is_complete(group) and not self._may_train(group):
            del self.groups[ticket.group]
            self.finished.add(ticket.group)

    def next_step(self) -> list[int]:
        """Numbers of the groups that a take may have, the ``wait`` policy apart; fewer than a step if it must wait."""
        complete = sorted(number for number, group in self.groups.items() if self._is_complete(group))
        slow = min((number for number, group in self.groups.items() if not self._is_complete(group)), default=None)
        window = self.config.order_window
        in_order = [n for n in complete if window is None or slow is None or n - slow < window]
        return in_order[: self.config.groups_per_step]

    def take(self, batch: TrainBatch) -> None:
        """The oldest complete groups, whole and in order, under a legal mask."""
        numbers = self.next_step()
        expected = [m.episode for n in numbers for _, m in sorted(self.groups[n].items()) if m.episode is not None]
        assert len(numbers) == self.config.groups_per_step
        assert [e.episode_id for e in batch.episodes] == [episode.episode_id for episode in expected]
        assert [e.reward for e in batch.episodes] == [episode.reward for episode in expected]
        if self.config.staleness == "wait":
            assert batch.num_trained_tokens == sum(episode.num_sampled_tokens for episode in expected)
        self.taken.append(as_seen(batch))
        self.open_step = tuple(numbers)
        for number in numbers:
            del self.groups[number]

    def train(self) -> None:
        self.finished.update(self.open_step)
        self.open_step = ()

    def _wants_dispatch(self, group: dict[int, ModelMember]) -> bool:
        return len(group) < self.config.group_size or any(m.is_waiting for m in group.values())

    def _is_complete(self, group: dict[int, ModelMember]) -> bool:
        return not self._wants_dispatch(group) and all(member.ticket is None for member in group.values())

    def _may_train(self, group: dict[int, ModelMember]) -> bool:
        rewards = [m.episode.reward for m in group.values() if m.episode is not None]
        if len(rewards) < min(2, self.config.group_size):
            return False
        return self.config.group_filter == "none" or len(set(rewards)) > 1


def as_seen(batch: TrainBatch) -> Any:
    """All of a batch that a trainer sees."""
    return [
        (
            e.episode_id,
            e.group,
            e.reward,
            [(t.trajectory.token_ids.tolist(), t.loss_mask.tolist()) for t in e.trajectories],
        )
        for e in batch.episodes
    ]
