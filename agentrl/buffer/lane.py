"""What the buffer keeps of one trained policy: its clock, its share of the admission bound, the groups it may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from agentrl.buffer.admission import admissible
from agentrl.buffer.config import BufferConfig
from agentrl.buffer.group import Group
from agentrl.buffer.order import in_turn, in_window
from agentrl.buffer.staleness import wait_permits
from agentrl.buffer.starvation import DroppedGroups
from agentrl.types.errors import Failure
from agentrl.types.version import PolicyVersion


class Lane:
    """The groups that one policy is to train, and when it may.

    `accepted` counts episodes that gave their place back and are part of one of its steps or may yet be; `running`
    those of its environments that hold a place. A lane that `is_over` has made its last step: it bounds nothing and
    gets nothing any more. `number` says which number in the mix an environment's n-th group has.
    """

    def __init__(
        self,
        policy: str,
        config: BufferConfig,
        version: PolicyVersion,
        max_groups: int | None,
        number: Callable[[str, int], int],
    ) -> None:
        self.policy, self.config, self._number = policy, config, number
        self.loaded = version
        self.accepted = version.step * config.episodes_per_step
        self.running = 0
        self.ready: list[Group] = []
        self.taken: list[Group] = []
        self.groups_left = max_groups
        self.dropped = DroppedGroups(config.max_filtered_groups)
        self.is_over = False

    def admissible(self, places: int, running: int, reserved: int = 0) -> int:
        """Episodes that may start as far as this policy's staleness goes.

        `running` are all of the run; `reserved` of those that may start within the bound are kept for others.
        """
        return admissible(
            self.running + places - running,
            self.running,
            self.accepted + reserved,
            self.loaded.step,
            self.config.episodes_per_step,
            self.config.staleness_bound,
        )

    def drop_reason(self, group: Group) -> str | None:
        """Why the policy is not to train a complete group, or None."""
        if len(group.episodes) < min(2, group.size):
            return "group_failed"
        if self.config.group_filter == "spread" and not group.has_spread(self.policy):
            return "no_spread"
        return None

    def next_groups(self, step: int, groups: Iterable[Group], begun: Mapping[str, int]) -> list[Group]:
        """The groups of its step by their numbers; none if it may not be taken now.

        Environments take turns as the mix has them: what a step trains has the declared shares, however slow some are.
        Under ``wait`` the oldest are taken where the bound lets no younger one go before them.

        Args:
            step: of the version that is to train them.
            groups: of which something is missing, of all policies.
            begun: groups that have begun so far, by environment, for each in which the policy is trained.
        """
        unfinished = [group for group in groups if self.policy in group.started]
        by_number = {group.number: group for group in self.ready}
        started = {number: group.started[self.policy] for number, group in by_number.items()}
        may_go = in_window(started, [group.number for group in unfinished], self.config.order_window)
        by_environment: dict[str, list[int]] = {}
        for number in may_go:
            by_environment.setdefault(by_number[number].environment, []).append(number)
        waiting = [*unfinished, *self.ready]
        past = {name: count - sum(group.environment == name for group in waiting) for name, count in begun.items()}
        held_back = by_number.keys() - set(may_go)
        expected = {group.environment for group in unfinished} | {by_number[n].environment for n in held_back}
        chosen = in_turn(by_environment, expected, past, self._number, self.config.groups_per_step)
        if len(chosen) < self.config.groups_per_step:
            return []
        for numbers in (chosen, may_go[: self.config.groups_per_step]):
            if self.config.staleness != "wait" or self._permits(numbers, step, waiting):
                return [by_number[number] for number in sorted(numbers)]
        return []

    def describe_stall(
        self, step: int, environments: Sequence[str], groups: Iterable[Group], running: int, failure: Failure | None
    ) -> str:
        """Why its step does not come; of several environments one is waited for whose turn it is."""
        unfinished = [group for group in groups if self.policy in group.started]
        ready, incomplete = (Counter(g.environment for g in found) for found in (self.ready, unfinished))
        counts = (f"of '{name}' {ready[name]} ready and {incomplete[name]} incomplete" for name in environments)
        turns = f"environments take turns: {', '.join(counts)}; " if len(environments) > 1 else ""
        return (
            f"step {step} of policy '{self.policy}' waited {self.config.stall_s:g} s for {self.config.groups_per_step} "
            f"complete groups: {len(self.ready)} are ready, {len(unfinished)} incomplete, {running} episodes generate; "
            f"{turns}{self.dropped.explain()}; last failure: {failure or 'none'}. "
            "Look at the engine's log; raise buffer.stall_s if episodes are long"
        )

    def _permits(self, chosen: Sequence[int], step: int, waiting: Iterable[Group]) -> bool:
        """Whether all that these leave behind can still be trained in time."""
        outstanding: dict[int, int] = {}
        for group in waiting:
            if group.number not in chosen:
                started = group.started[self.policy]
                outstanding[started] = outstanding.get(started, 0) + group.size
        return wait_permits(outstanding, step, self.config.staleness_bound, self.config.episodes_per_step)
