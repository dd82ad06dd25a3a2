"""Trains on episodes of an environment by the command that users have, for tests of adapters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.types.episode import Episode
from tests.integration import runs

_PLACED_BEFORE = "[policies.main.chat]"


@dataclass(frozen=True)
class Trained:
    """A run that has ended: its folder, and its ledger's lines of episodes that were trained.

    Example of a line: ``{"episode_id": "train-000000-0", "task": "bfcl/train/0", "outcome": "trained", ...}``.
    """

    folder: Path
    ledger: list[Mapping[str, Any]]


def length(episode: Episode) -> float:
    """Sampled tokens over a thousand: a score in which episodes of a policy that knows nothing differ."""
    return episode.num_sampled_tokens / 1000


def train(folder: Path, model: Path, environment: str, *overrides: str) -> Trained:
    """Train one step by `agentrl train`; asserts what must hold of such a run.

    `environment` is the recipe's ``[environment]`` table, whole, or several ``[environments.NAME]``, without scorers:
    the verifier's score is joined by `length`, so that a group of a random policy has something to learn from.
    Asserted: the run's ledger and archive are whole, and the trainer found the very log-probabilities that the engine
    had drawn by.
    """
    recipe = folder / "recipe.toml"
    scorers = "".join(
        f'[[{table}.scorers]]\nkind = "verifier"\n'
        f'[[{table}.scorers]]\nkind = "function"\nname = "length"\nfunction = "tests.adapters.trained:length"\n'
        for table in re.findall(r"^\[(environment|environments\.\w+)\]$", environment, re.MULTILINE)
    )
    rest = runs.RECIPE[runs.RECIPE.index(_PLACED_BEFORE) :]
    recipe.write_text(f'name = "test"\nsteps = 1\n{environment}\n{scorers}{rest}')
    given = (f"policies.main.model={model}", f"runs_folder={folder / 'runs'}", *overrides)
    done = runs.agentrl("train", recipe, *given)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (folder / "runs").iterdir()
    lines = runs.assert_whole(run)
    runs.assert_archived_as_in_ledger(run)
    trained = [line for line in lines if line["outcome"] == "trained"]
    assert trained, lines
    assert max(row.get("trainer/fresh_gap_max_nats", 0.0) for row in runs.metrics(run)) < 1e-3
    return Trained(run, trained)
