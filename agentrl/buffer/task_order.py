"""Which task each group of a run plays, and which tasks of each environment are done."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from agentrl.buffer.frontier import Frontier, FrontierState
from agentrl.buffer.group import Group
from agentrl.buffer.mix import Mix


class TaskOrder:
    """Hands out numbers of groups in the mix of the environments, each with the next task of its own.

    A group's number says its environment and which of that environment's tasks it plays. The tasks of a group that was
    trained are done with the checkpoint that holds what was made of it; until then it is kept here.

    Example: weights 2 and 1 for a and b, and nothing done yet: ``next_of("ab")`` is ``("a", 0)``; number 4 is b's
    second task.
    """

    def __init__(self, weights: Mapping[str, float], frontiers: Mapping[str, FrontierState]) -> None:
        self._mix = Mix(weights)
        self._frontiers = {name: Frontier.restore(frontiers.get(name, FrontierState())) for name in weights}
        self._trained: list[Group] = []

    def next_of(self, environments: Collection[str]) -> tuple[str, int] | None:
        """Of the next groups of these environments the one that comes first: environment and ordinal of its task."""
        ordinals = {name: self._frontiers[name].peek() for name in environments}
        return min(ordinals.items(), key=lambda task: self._mix.number(*task), default=None)

    def number(self, environment: str, ordinal: int) -> int:
        """Number of the group that plays an environment's task."""
        return self._mix.number(environment, ordinal)

    def num_begun(self, environment: str) -> int:
        """Tasks of an environment that were handed out."""
        return self._frontiers[environment].num_begun

    def begin(self, environment: str) -> int:
        """The number of the environment's next group, whose task is now handed out."""
        return self._mix.number(environment, self._frontiers[environment].next())

    def hold(self, number: int) -> None:
        """A group's task was handed out before, and is still being worked on."""
        environment, ordinal = self._mix.of(number)
        self._frontiers[environment].hold([ordinal])

    def finish(self, numbers: Iterable[int]) -> None:
        """The tasks of these groups are done and never come again."""
        for number in numbers:
            environment, ordinal = self._mix.of(number)
            self._frontiers[environment].finish([ordinal])

    def is_done(self, number: int) -> bool:
        """Whether a group's task is done."""
        environment, ordinal = self._mix.of(number)
        return self._frontiers[environment].is_done(ordinal)

    def finish_with_checkpoint(self, group: Group) -> None:
        """A group's task is done with the checkpoint that holds all steps that trained it."""
        self._trained.append(group)

    def at_checkpoint(self, steps: Mapping[str, int]) -> dict[str, FrontierState]:
        """Tasks that are done by environment, for a checkpoint that holds these steps of the policies."""
        waiting = [group for group in self._trained if not group.is_held_by(steps)]
        self.finish(group.number for group in self._trained if group.is_held_by(steps))
        self._trained = waiting
        return {name: frontier.state() for name, frontier in self._frontiers.items()}
