"""Makes TextWorld's games of seeds, and keeps the compiled ones: a compiler takes a second or two for each."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

from pydantic import Field

from agentrl.config.cache import cache_folder
from agentrl.types.task import Split, Task
from agentrl_environments.packages import Package, PackagedOptions
from agentrl_environments.randomness import OwnChance

PACKAGE = Package("textworld", "==1.7.0")
_GAME = "game.z8"


class TextWorldOptions(PackagedOptions):
    """How large a game's world is, and how long its quest."""

    num_rooms: Annotated[int, Field(ge=1, le=50)] = 3
    """Rooms of the house."""
    num_objects: Annotated[int, Field(ge=1, le=100)] = 6
    """Things in it; what the quest needs is there in any case."""
    quest_length: Annotated[int, Field(ge=1, le=20)] = 3
    """Commands that the quest takes, behind those that lead to where it begins."""
    shows_commands: bool = False
    """Add the commands that are possible to what the policy reads; it then need not find the words."""


def check_package(options: TextWorldOptions) -> None:
    """Tasks are endless. Raises ConfigError if the package is missing."""
    PACKAGE.load("textworld", options)


def sample_task(options: TextWorldOptions, split: Split, ordinal: int, seed: int) -> Task:
    """The task of that ordinal; seeds of held-out games are even, and the same whatever the run's seed."""
    own_seed = seed if split is Split.TRAIN else 0
    digest = hashlib.sha256(f"{split}-{own_seed}-{ordinal}".encode()).digest()
    drawn = 2 * (int.from_bytes(digest[:4]) >> 2) + (split is Split.TRAIN)
    return Task("textworld", split, ordinal, {"seed": drawn})


def compiled_game(options: TextWorldOptions, seed: int) -> Path:
    """The game of a seed as the interpreter takes it, with its JSON beside it; made unless it is there."""
    made_of = [
        options.num_rooms,
        options.num_objects,
        options.quest_length,
        seed,
        importlib.metadata.version("textworld"),
    ]
    name = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:24]
    folder = (cache_folder() or Path(tempfile.gettempdir()) / f"agentrl-{os.getuid()}") / "textworld" / name
    if not (folder / _GAME).exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as making:
            _make(options, seed, Path(making) / name)
            # Another process may have made it meanwhile; then that one is played.
            with contextlib.suppress(OSError):
                (Path(making) / name).rename(folder)
    return folder / _GAME


def _make(options: TextWorldOptions, seed: int, folder: Path) -> None:
    textworld = PACKAGE.load("textworld", options)
    generator = PACKAGE.load("textworld.generator", options)
    wanted = textworld.GameOptions()
    wanted.seeds = seed
    wanted.nb_rooms, wanted.nb_objects, wanted.quest_length = (
        options.num_rooms,
        options.num_objects,
        options.quest_length,
    )
    wanted.path = str(folder / _GAME)
    with OwnChance(seed):
        generator.compile_game(generator.make_game(wanted), wanted)
