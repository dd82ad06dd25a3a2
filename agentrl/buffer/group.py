"""A group: the episodes of one task, what is still missing of it, and which policies are to train it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.buffer.forks import draw_fork, find_parent
from agentrl.types.episode import Episode, Fork, Ticket
from agentrl.types.task import Task
from agentrl.types.version import PolicyVersion


def holds(checkpoint: Mapping[str, int], trained_by: Mapping[str, int]) -> bool:
    """Whether a checkpoint of these steps, by policy, holds the versions that were made of something."""
    return all(checkpoint.get(policy, 0) >= step for policy, step in trained_by.items())


@dataclass(slots=True)
class Group:
    """Members are numbered 0 to size - 1; each is dispatched until it ends well or its attempts are spent.

    A group is complete when no member is missing or in flight. Failed members are not in `episodes`:
    an infrastructure failure leaves the group and never scores 0; `failed` has the reason of each by its name.
    The last `forks` members go on from a state of another (`buffer/forks.py`), and wait for it.
    `number` counts through all epochs and environments of a run. `started` has the step of the weights that each
    policy began it with, for those that train it.

    `waits_for` are the policies that are not done with a complete group; `trained_by` has the step of the version that
    each of the others made of it, `left_out` why a policy does not train it. `trained_tokens` counts by episode.

    Example: a speaker's step 4 took the group, a listener's has not: ``waits_for`` is {"listener"}, ``trained_by``
    {"speaker": 5}.
    """

    number: int
    task: Task
    size: int
    started: dict[str, int]
    environment: str = ""
    num_dispatched: int = 0
    in_flight: set[tuple[int, int]] = field(default_factory=set)  # (member, attempt)
    redispatch: list[tuple[int, int]] = field(default_factory=list)  # (member, attempt)
    episodes: list[Episode] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    waits_for: set[str] = field(default_factory=set)
    trained_by: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    trained_tokens: dict[str, int] = field(default_factory=dict)
    forks: int = 0

    @property
    def policies(self) -> tuple[str, ...]:
        """Policies that train it."""
        return tuple(self.started)

    @property
    def started_step(self) -> int:
        """The oldest step that it began with."""
        return min(self.started.values(), default=0)

    @property
    def drop_reason(self) -> str:
        """Why no policy trains it: what the first that left it out said; empty if none did."""
        return next(iter(self.left_out.values()), "")

    @property
    def is_complete(self) -> bool:
        """Whether nothing more will come."""
        return self.num_dispatched == self.size and not self.in_flight and not self.redispatch

    @property
    def wants_dispatch(self) -> bool:
        """Whether a member waits for a place, and for nothing else."""
        return self._next_member() is not None

    @property
    def num_waiting_forks(self) -> int:
        """Forks that are not dispatched, or to be dispatched again."""
        first = max(self.num_dispatched, self.size - self.forks)
        return self.size - first + sum(self.is_fork(member) for member, _ in self.redispatch)

    @property
    def num_counted(self) -> int:
        """Members that have given their place back and are not to be dispatched again."""
        return self.num_dispatched - len(self.in_flight) - len(self.redispatch)

    def next_member(self) -> tuple[int, int]:
        """Member and attempt to dispatch now; one must want it."""
        entry = self._next_member()
        assert entry is not None
        if entry in self.redispatch:
            self.redispatch.remove(entry)
        else:
            self.num_dispatched += 1
        self.in_flight.add(entry)
        return entry

    def ticket(self, member: int, attempt: int, seed: int, loaded: Mapping[str, PolicyVersion]) -> Ticket:
        """Leave for a member to be played while engines serve the `loaded` versions.

        A fork without a state to go on from is played from the start.
        """
        name = f"{self.task.split}-{self.number:06d}-{member}" + (f"-retry{attempt}" if attempt else "")
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=6).digest()
        own = int.from_bytes(digest, "little")
        fork = self._fork() if self.is_fork(member) else None
        return Ticket(name, self.task, self.number, member, attempt, own, dict(loaded), self.environment, fork)

    def is_fork(self, member: int) -> bool:
        """Whether a member is to go on from another's state."""
        return member >= self.size - self.forks

    def lands(self, ticket: Ticket) -> bool:
        """Take a member out of flight; False if it was not in flight."""
        entry = (ticket.member, ticket.attempt)
        was_in_flight = entry in self.in_flight
        self.in_flight.discard(entry)
        return was_in_flight

    def count_trained(self, tokens: Mapping[str, int]) -> None:
        """Add the tokens of each episode that enter the loss of one more policy."""
        for episode in self.episodes:
            name = episode.episode_id
            self.trained_tokens[name] = self.trained_tokens.get(name, 0) + tokens[name]

    def is_held_by(self, checkpoint: Mapping[str, int]) -> bool:
        """Whether a checkpoint of these steps holds all that was made of it."""
        return holds(checkpoint, self.trained_by)

    @property
    def rewards(self) -> list[float]:
        """Rewards of the members that ended well, in order of members."""
        return [e.reward for e in self.ordered() if e.reward is not None]

    def has_spread(self, policy: str) -> bool:
        """Whether some agent of a policy did better in one member than in another that it is compared with."""
        compared: dict[tuple[Fork | None, str], list[float]] = {}
        for episode in self.episodes:
            for agent, reward in episode.rewards_of(policy).items():
                compared.setdefault((episode.ticket.fork, agent), []).append(reward)
        return any(max(rewards) > min(rewards) for rewards in compared.values())

    def ordered(self) -> list[Episode]:
        """Episodes that ended well, in order of members."""
        return sorted(self.episodes, key=lambda episode: episode.ticket.member)

    def _next_member(self) -> tuple[int, int] | None:
        """Member and attempt that may be dispatched; those that failed come first, in order."""
        new = [(self.num_dispatched, 0)] if self.num_dispatched < self.size else []
        waiting = [*self.redispatch, *new]
        if self.forks and any(self.is_fork(member) for member, _ in waiting) and not self._find_parent()[1]:
            waiting = [entry for entry in waiting if not self.is_fork(entry[0])]
        return waiting[0] if waiting else None

    def _fork(self) -> Fork | None:
        parent, _ = self._find_parent()
        return draw_fork(parent) if parent is not None else None

    def _find_parent(self) -> tuple[Episode | None, bool]:
        waited_for = {member for member, _ in (*self.in_flight, *self.redispatch)}
        return find_parent(self.episodes, waited_for, self.size - self.forks, self.num_dispatched)
