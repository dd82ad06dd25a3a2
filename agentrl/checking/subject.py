"""The environment that is checked, and what a check says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from agentrl.checking.players import ExpertPlayer, MakePlayer, RandomPlayer
from agentrl.config.base import ConfigModel
from agentrl.envs.definition import EnvironmentDefinition
from agentrl.envs.starting import WorkerCommand
from agentrl.protocols import EnvironmentHost
from agentrl.types.task import Split, Task

GOLD_NAMES = ("gold", "expert")


class Verdict(StrEnum):
    """What a check found. A `NOTE` is no fault, but worth knowing; `SKIPPED` means that nothing is promised."""

    OK = "ok"
    NOTE = "note"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, for a person; `remedy` says what to do where it is not well.

    Example: ``Finding("leaks", Verdict.FAILED, "3 more open files after 8 episodes", "close them in close()")``.
    """

    check: str
    verdict: Verdict
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """An environment with options, a host of its instances, and tasks of it."""

    name: str
    definition: EnvironmentDefinition[ConfigModel]
    options: ConfigModel
    host: EnvironmentHost
    tasks: Sequence[Task]
    max_turns: int
    logs: Path

    @property
    def gold(self) -> str | None:
        """The expert that plays rightly under these options, if the author wrote one: ``gold``, or ``expert``."""
        known = {name: self.definition.experts[name] for name in GOLD_NAMES if name in self.definition.experts}
        able = (name for name, expert in known.items() if expert.can_play is None or expert.can_play(self.options))
        return next(able, None)

    @property
    def train_tasks(self) -> list[Task]:
        """The training tasks among them."""
        return [task for task in self.tasks if task.split is Split.TRAIN]

    @property
    def command(self) -> WorkerCommand:
        """What a worker process of it is started with."""
        return WorkerCommand(self.name, self.options.model_dump(mode="json"), self.logs, label="checked")

    def expert(self, name: str) -> MakePlayer:
        """Players that act as one of its experts. Raises ConfigError if it has none of that name."""
        self.definition.expert(name)
        return lambda task, seed: ExpertPlayer(self.definition, self.options, name, task, seed)

    @property
    def players(self) -> dict[str, MakePlayer]:
        """Chance, and the expert that plays rightly."""
        known: dict[str, MakePlayer] = {"random": lambda task, seed: RandomPlayer(seed)}
        return known if self.gold is None else known | {"gold": self.expert(self.gold)}
