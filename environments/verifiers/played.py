"""What both generations of verifiers have: tasks by their place in a list, and rollouts that give a score."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agentrl.types.environment import Score
from agentrl_environments.verifiers.options import RolloutOptions

NO_KEY = "AGENTRL_SESSION_IN_PATH"
"""Environment variable for the API key of verifiers' client, which needs none: the URL names the session."""


@dataclass(frozen=True, slots=True)
class Posed:
    """A task, as its package has it: `key` tells it from others, `prompt` is what a person reads of it."""

    index: int
    key: str
    prompt: str
    task: Any


@dataclass(frozen=True, slots=True)
class Played:
    """What became of a rollout: its score, and the errors of one that has failed. `last_words` are the policy's."""

    score: Score
    errors: tuple[str, ...] = ()
    last_words: str = ""


class Rollouts(Protocol):
    """An environment of verifiers in this process; its rollouts come one at a time."""

    name: str

    @property
    def num_tasks(self) -> int | None:
        """Tasks that it has; None if they have no end."""

    def task(self, index: int) -> Posed:
        """A task by its place. Raises ConfigError if there is none."""

    async def play(self, posed: Posed, url: str, agent: str, episode: str) -> Played:
        """Play a task by replies of an agent, which the session at a URL gives."""


def renderer_config(options: RolloutOptions) -> dict[str, Any]:
    """The renderer as verifiers takes it: what was said stays as it was sampled, its reasoning too."""
    return {"thinking_retention": "all", **options.renderer_options, "name": options.renderer}


def keep(record: Any, folder: Path | None, episode: str) -> None:
    """Write verifiers' record of an episode, if a folder is given for it."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{episode}.json").write_text(json.dumps(record))
