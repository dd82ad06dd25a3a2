"""A group: the episodes of one task, and what is still missing of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.types.episode import Episode, Ticket
from agentrl.types.task import Task
from agentrl.types.version import PolicyVersion


@dataclass(slots=True)
class Group:
    """Members are numbered 0 to size - 1; each is dispatched until it ends well or its attempts are spent.

    A group is complete when no member is missing or in flight. Failed members are not in `episodes`:
    an infrastructure failure leaves the group and never scores 0; `failed` has their names.
    `number` counts through all epochs, of which each may have the task once.
    """

    number: int
    task: Task
    size: int
    started_step: int
    num_dispatched: int = 0
    in_flight: set[tuple[int, int]] = field(default_factory=set)  # (member, attempt)
    redispatch: list[tuple[int, int]] = field(default_factory=list)  # (member, attempt)
    episodes: list[Episode] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether nothing more will come."""
        return self.num_dispatched == self.size and not self.in_flight and not self.redispatch

    @property
    def wants_dispatch(self) -> bool:
        """Whether a member waits for a place."""
        return bool(self.redispatch) or self.num_dispatched < self.size

    def next_member(self) -> tuple[int, int]:
        """Member and attempt to dispatch now."""
        if self.redispatch:
            entry = self.redispatch.pop(0)
        else:
            entry = (self.num_dispatched, 0)
            self.num_dispatched += 1
        self.in_flight.add(entry)
        return entry

    def ticket(self, member: int, attempt: int, seed: int, loaded: Mapping[str, PolicyVersion]) -> Ticket:
        """Leave for a member to be played while engines serve the `loaded` versions."""
        name = f"{self.task.split}-{self.number:06d}-{member}" + (f"-retry{attempt}" if attempt else "")
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=6).digest()
        own = int.from_bytes(digest, "little")
        return Ticket(name, self.task, self.number, member, attempt, own, dict(loaded))

    def lands(self, ticket: Ticket) -> bool:
        """Take a member out of flight; False if it was not in flight."""
        entry = (ticket.member, ticket.attempt)
        was_in_flight = entry in self.in_flight
        self.in_flight.discard(entry)
        return was_in_flight

    @property
    def rewards(self) -> list[float]:
        """Rewards of the members that ended well, in order of members."""
        return [e.reward for e in self.ordered() if e.reward is not None]

    @property
    def has_spread(self) -> bool:
        """Whether some member did better than another."""
        rewards = self.rewards
        return max(rewards) > min(rewards)

    def ordered(self) -> list[Episode]:
        """Episodes that ended well, in order of members."""
        return sorted(self.episodes, key=lambda episode: episode.ticket.member)
