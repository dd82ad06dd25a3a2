"""What an environment's author registers: how to make tasks, how to make environments, who can play."""

from __future__ import annotations

import inspect
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from agentrl import registry
from agentrl.config.base import ConfigModel, parse_config
from agentrl.envs.epochs import place_in_list
from agentrl.protocols import AttachableEnvironment, Environment, SnapshotEnvironment
from agentrl.types.environment import EnvironmentDescription, Origin, Placement, Recovery
from agentrl.types.errors import Boundary, ConfigError, boundary
from agentrl.types.message import Message
from agentrl.types.task import Split, Task

Options = TypeVar("Options", bound=ConfigModel)


class NoOptions(ConfigModel):
    """Options of an environment that has none."""


@dataclass(frozen=True, slots=True)
class Expert(Generic[Options]):
    """A scripted player: gives the next assistant message for a task and the conversation so far.

    The generator is seeded by the episode and fresh at every call, so the first draw of each call is
    the same: an expert chooses its procedure with it and stays with the choice.
    """

    description: str
    act: Callable[[Options, Task, Sequence[Message], random.Random], Message]
    can_play: Callable[[Options], bool] | None = None
    """Whether it knows what to do under these options; without it, under any."""


@dataclass(frozen=True, slots=True)
class EnvironmentDefinition(Generic[Options]):
    """One kind of environment, with options of one class.

    `sample_task(options, split, ordinal, seed)` must give the same task for the same arguments.
    `placement` says where a recipe may have instances run: ``process`` (the default) holds for anything
    that might block, hang or crash; ``inline`` is for environments whose every call is bounded and short,
    since an inline call that blocks holds the whole worker.

    Example: see ``environments/sql/__init__.py``.
    """

    name: str
    description: str
    sample_task: Callable[[Options, Split, int, int], Task]
    create: Callable[[Options, Task], Environment]
    # Holds for a definition whose functions take NoOptions, or any options: a default cannot say that.
    options: type[Options] = NoOptions  # type: ignore[assignment]
    experts: Mapping[str, Expert[Options]] = field(default_factory=dict)
    agents: tuple[str, ...] = ()
    """Names of the agents that act in it, where it knows several."""
    words: tuple[str, ...] = ()
    """Words that a tokenizer made for this environment keeps whole."""
    placement: Placement = "process"
    interpreter: Path | None = None
    """Python that instances run in, by processes, unless the recipe names another; without one, the run's own."""
    is_deterministic: bool = False
    """The same actions in a fresh instance give the same results, so that an episode whose worker died can be
    played again up to where it was."""
    external_tools: frozenset[str] = frozenset()
    """Tools that act outside the instance (send, pay, publish): their calls are never repeated."""
    restore: Callable[[Options, Task, bytes], SnapshotEnvironment] | None = None
    """Makes an instance from what another's `snapshot` gave; options, task and snapshot."""
    reattach: Callable[[Options, Task, str], AttachableEnvironment] | None = None
    """Makes an instance over the live session that another's `handle` named; raises if it is gone."""
    reattach_fenced: (
        Callable[[Options, Task, str, int], AttachableEnvironment | Awaitable[AttachableEnvironment]] | None
    ) = None
    """As `reattach`, and used in its place, with the worker's fencing token behind the handle: from then on the session
    should refuse whoever reattached under a smaller token, and the worker that began it."""
    needs_sandbox: bool = False
    """Its instances ask the run's keeper for sandboxes; one is started for it, wherever it is played."""
    has_program: bool = False
    """Its instances are `ProgramEnvironment`s that bring the program which plays them, and run it where they live: the
    scaffold is ``own_program``."""
    num_tasks: Callable[[Options], int | None] | None = None
    """Number of training tasks with these options, for an environment that has a list of them: `sample_task` is then
    asked for ordinals below it only, each once in every epoch. Without it, or with None, training tasks are endless."""

    @property
    def recovery(self) -> Recovery:
        """How the state of an instance can be had again."""
        has_handles = self.reattach is not None or self.reattach_fenced is not None
        return Recovery(has_handles, self.restore is not None, self.is_deterministic, self.external_tools)

    def describe(self, options: Options) -> EnvironmentDescription:
        """What a run needs to know. Raises ConfigError if there are no training tasks."""
        size = None if self.num_tasks is None else self.num_tasks(options)
        if size is not None and size < 1:
            raise ConfigError(f"environment '{self.name}' has {size} training tasks; its options may leave out all")
        python = None if self.interpreter is None else str(self.interpreter.absolute())
        asks = self.needs_sandbox, self.has_program
        return EnvironmentDescription(self.name, self.recovery, size, self.placement, python, *asks)

    def sampler(self, options: Options, split: Split, seed: int) -> Callable[[int], Task]:
        """Gives the tasks of a split in a run's order, counted from 0. Raises ConfigError if there are none."""
        size = self.describe(options).num_tasks if split is Split.TRAIN else None
        if size is None:
            return lambda number: self.sample_task(options, split, number, seed)
        return lambda number: self.sample_task(options, split, place_in_list(number, size, seed), seed)

    def sample(self, options: Options, split: Split, seed: int, ordinals: Sequence[int]) -> list[Task]:
        """Tasks of a split in a run's order, counted from 0. Raises ConfigError if there are none."""
        sampler = self.sampler(options, split, seed)
        return [sampler(ordinal) for ordinal in ordinals]

    async def make(self, options: Options, task: Task, origin: Origin | None) -> Environment:
        """An instance, fresh or from where another one was. Raises EpisodeError if that is gone."""
        if origin is not None and origin.handle is not None and self.recovery.has_handles:
            with boundary(Boundary.ENVIRONMENT, "lost", f"its session {origin.handle} cannot be reattached"):
                found = self._reattach(options, task, origin.handle, origin.token)
                return await found if inspect.isawaitable(found) else found
        if origin is not None and origin.snapshot is not None and self.restore is not None:
            with boundary(Boundary.ENVIRONMENT, "lost", "its last snapshot cannot be restored"):
                return self.restore(options, task, origin.snapshot)
        return self.create(options, task)

    def _reattach(
        self, options: Options, task: Task, handle: str, token: int
    ) -> AttachableEnvironment | Awaitable[AttachableEnvironment]:
        if self.reattach_fenced is not None:
            return self.reattach_fenced(options, task, handle, token)
        assert self.reattach is not None
        return self.reattach(options, task, handle)

    def parse_options(self, values: Mapping[str, Any]) -> Options:
        """The environment's options from plain values. Raises ConfigError."""
        return parse_config(self.options, dict(values), f"options of environment '{self.name}'")

    def expert(self, name: str) -> Expert[Options]:
        """The expert of that name. Raises ConfigError."""
        if name not in self.experts:
            raise ConfigError(
                f"environment '{self.name}' has no expert '{name}'; it has {', '.join(self.experts) or 'none'}"
            )
        return self.experts[name]


def load_environment(name: str) -> EnvironmentDefinition[ConfigModel]:
    """Import the registered environment, or one named as ``module:attribute``. Raises ConfigError."""
    definition = registry.load_plugin(registry.ENVIRONMENTS, name)
    if not isinstance(definition, EnvironmentDefinition):
        raise ConfigError(f"environment '{name}' is a {type(definition).__name__}, not an EnvironmentDefinition")
    return definition
