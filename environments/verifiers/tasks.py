"""Which tasks of a taskset are trained on, and which are held out: every so many'th, by their order."""

from __future__ import annotations

from agentrl.types.errors import ConfigError
from agentrl.types.task import Split, Task
from agentrl_environments.verifiers.played import Rollouts


def num_training_tasks(rollouts: Rollouts, every: int) -> int | None:
    """Training tasks; None for a taskset without an end."""
    size = rollouts.num_tasks
    return None if size is None else size - size // every


def sample_task(environment: str, rollouts: Rollouts, split: Split, ordinal: int, every: int) -> Task:
    """The task of that ordinal, the same whatever the run's seed: a taskset is a list.

    Example: with every fifth held out, training tasks 0 to 4 have the indices 0, 1, 2, 3 and 5, held-out ones 4 and 9.

    Raises:
        ConfigError: the taskset is too small to have a held-out task.
    """
    index = place_in_taskset(split, ordinal, every, rollouts.num_tasks)
    return Task(environment, split, ordinal, {"index": index, "key": rollouts.task(index).key})


def place_in_taskset(split: Split, ordinal: int, every: int, size: int | None) -> int:
    """The index of a task of a split; held-out ones of a finite taskset come again behind the last."""
    if split is Split.TRAIN:
        return ordinal + ordinal // (every - 1)
    if size is None:
        return ordinal * every + every - 1
    if size < every:
        remedy = f"set options.heldout_every to {size} or less, or " if size > 1 else ""
        raise ConfigError(
            f"there are {size} tasks, and one of {every} is held out: none of these; {remedy}leave the evaluation out"
        )
    return ordinal % (size // every) * every + every - 1
