"""Fits a process-reward model to the turns of episodes: of runs, or played for the purpose."""

from __future__ import annotations

import asyncio
import math
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agentrl import registry
from agentrl.journal.archive_file import read_consumed
from agentrl.journal.archive_names import archive_files
from agentrl.models.reward_folder import RewardVersion, replace_reward_model, stated_version
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.launch import play_model
from agentrl.orchestration.model_files import read_model_files
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.orchestration.warmstart import WarmStartObserver
from agentrl.scorers.config import FunctionScorerConfig, VerifierConfig
from agentrl.types.episode import Episode
from agentrl.types.errors import Boundary, ConfigError, boundary
from agentrl.types.score import scored_turns
from agentrl.types.turn_score import ScoredTurn

if TYPE_CHECKING:
    from agentrl.trainer.reward_fit import FitOptions, FitQuality, LabelledContext

OUTCOME = "outcome"
_HELDOUT = 0.15
Labels = tuple[float | None, float | None]
Labeller = Callable[[Episode, ScoredTurn], Labels]


@dataclass(frozen=True, slots=True)
class PrmReport:
    """What a fit did: `left_out` counts episodes of no use by their reason, `quality` is of unseen tasks' states."""

    version: RewardVersion
    quality: FitQuality
    episodes: int
    states: int
    seconds: float
    left_out: Counter[str] = field(default_factory=Counter)


def recorded_episodes(run: RunDirectory, limit: int) -> list[Episode]:
    """The newest episodes in a run's archive, `limit` at most, trained or dropped. Raises ConfigError, StorageError."""
    episodes: list[Episode] = []
    for file in reversed(archive_files(run.episodes)):
        episodes = [*read_consumed(file), *episodes]
        if len(episodes) >= limit:
            break
    if not episodes:
        raise ConfigError(f"the archive of {run.path} holds no episode; it has some once the run has trained on them")
    return episodes[-limit:]


async def played_episodes(config: RunConfig, policy: str, count: int, observer: WarmStartObserver) -> list[Episode]:
    """Episodes that a recipe's policy plays as it is, without the scorers of turns. Raises AgentRLError."""
    observer.on_phase(f"{count} episodes of policy '{policy}'")
    kept = {
        name: section.model_copy(
            update={
                "scorers": tuple(s for s in section.scorers if isinstance(s, VerifierConfig | FunctionScorerConfig))
            }
        )
        for name, section in config.environments.items()
    }
    return await play_model(config.model_copy(update={"environments": kept}), policy, count, observer.on_progress)


def labeller(labels: str, policy: str) -> Labeller:
    """What labels states: their episode's outcome, or an expert's function. Raises ConfigError.

    The function takes a `ScoredTurn` and gives the worth of the state that its reply leads to, or a pair: the worth of
    the state that it was drawn from, and of that. None, for either, labels nothing.
    """
    if labels == OUTCOME:
        return lambda episode, turn: (_outcome(episode, policy, turn),) * 2
    if ":" not in labels:
        raise ConfigError(f"--labels {labels}: give {OUTCOME}, or a function as module:attribute")
    function = registry.load_target(labels)
    if not callable(function):
        raise ConfigError(f"--labels {labels} is a {type(function).__name__}, not a function")
    return lambda _, turn: _checked(labels, function, turn)


def labelled_contexts(episode: Episode, policy: str, label: Labeller) -> list[LabelledContext]:
    """The contexts of a policy's turns with their labels; turns of one branch share the longest of them.

    Raises ConfigError or EpisodeError: an expert gives no label that can be used.
    """
    from agentrl.trainer.reward_fit import LabelledContext  # loads torch

    found: list[tuple[np.ndarray, dict[int, float]]] = []
    turns = [turn for turn in scored_turns(episode) if turn.policy == policy]
    for turn in sorted(turns, key=lambda turn: -len(turn.token_ids)):
        prior, value = label(episode, turn)
        places = {len(turn.token_ids) - 1: value, turn.reply_start - 1: prior}
        places_of = next((places for ids, places in found if _begins(ids, turn.token_ids)), None)
        if places_of is None:
            places_of = {}
            found.append((turn.token_ids, places_of))
        places_of.update({place: worth for place, worth in places.items() if worth is not None and place >= 0})
    return [
        LabelledContext(ids, np.array(sorted(places)), np.array([places[p] for p in sorted(places)], np.float32))
        for ids, places in found
        if places
    ]


class PrmTraining:
    """One fit, from episodes to a folder that scorers load."""

    def __init__(self, output: Path, base: Path, policy: str, label: Labeller, is_replacing: bool = False) -> None:
        """Raises ConfigError for what shows before anything is played."""
        self._output, self._base, self._policy, self._label = output.absolute(), base, policy, label
        read_model_files(base)
        if self._output.exists() and not is_replacing:
            raise ConfigError(
                f"{self._output} exists already; remove it, choose another output, or give --replace: runs that use it "
                "go on with the new one"
            )
        if self._output.exists() and (not self._output.is_dir() or stated_version(self._output) is None):
            raise ConfigError(f"{self._output} is no reward model, and is not replaced by one; choose another output")

    async def fit(self, episodes: Sequence[Episode], options: FitOptions, observer: WarmStartObserver) -> PrmReport:
        """Label, fit and write.

        Raises:
            ConfigError: there is nothing to learn from these episodes.
            StorageError: the folder cannot be written.
        """
        from agentrl.trainer.reward_fit import fit_reward_model  # loads torch and transformers

        started, left_out = time.monotonic(), Counter[str]()
        by_task = self._labelled(episodes, left_out)
        train, check = _split(by_task, options.seed)
        contexts = [context for found in by_task.values() for context in found]
        labels = np.concatenate([context.labels for context in contexts])
        if labels.min() == labels.max():
            raise ConfigError(
                f"all {len(labels)} states have the label {labels[0]:g}, so there is nothing to learn; give other "
                "episodes, or more"
            )
        observer.on_phase(f"fitting {len(labels):,} states of {len(by_task):,} tasks")
        made = self._output.with_name(self._output.name + ".making")
        shutil.rmtree(made, ignore_errors=True)
        try:
            quality = await asyncio.to_thread(
                fit_reward_model, self._base, train, check, options, made, observer.on_progress
            )
            version = replace_reward_model(made, self._output)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        used = len(episodes) - sum(left_out.values())
        return PrmReport(version, quality, used, len(labels), time.monotonic() - started, left_out)

    def _labelled(self, episodes: Iterable[Episode], left_out: Counter[str]) -> dict[str, list[LabelledContext]]:
        """Contexts by task. Raises ConfigError if there are too few tasks to keep some unseen."""
        by_task: dict[str, list[LabelledContext]] = {}
        for episode in episodes:
            reason = "failed" if episode.failure is not None else "without a reward" if episode.reward is None else None
            contexts = [] if reason else labelled_contexts(episode, self._policy, self._label)
            if not contexts:
                left_out[reason or "without a label"] += 1
                continue
            by_task.setdefault(f"{episode.ticket.environment}/{episode.ticket.task.id}", []).extend(contexts)
        if len(by_task) < 2:
            why = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "there are no others"
            raise ConfigError(f"labelled episodes of {len(by_task)} tasks, and a fit needs 2 at least ({why})")
        return by_task


def _split(by_task: dict[str, list[LabelledContext]], seed: int) -> tuple[list[LabelledContext], list[LabelledContext]]:
    """Contexts to fit, and those of unseen tasks."""
    tasks = sorted(by_task)
    random.Random(seed).shuffle(tasks)
    num_unseen = max(1, round(len(tasks) * _HELDOUT))
    unseen, seen = tasks[:num_unseen], tasks[num_unseen:]
    return [c for task in seen for c in by_task[task]], [c for task in unseen for c in by_task[task]]


def _outcome(episode: Episode, policy: str, turn: ScoredTurn) -> float | None:
    return episode.rewards_of(policy).get(turn.key.agent)


def _checked(name: str, function: Callable[[ScoredTurn], object], turn: ScoredTurn) -> Labels:
    """What an expert gives of a turn. Raises EpisodeError if it raises, ConfigError for what is no label."""
    with boundary(Boundary.SCORER, "labels", name):
        given = function(turn)
    pair = given if isinstance(given, tuple) else (None, given)
    if len(pair) != 2 or not all(worth is None or _is_finite(worth) for worth in pair):
        raise ConfigError(f"--labels {name} gave {given!r} of {turn.key}; give a finite number, or a pair of such")
    prior, value = (None if worth is None else float(worth) for worth in pair)
    return prior, value


def _is_finite(worth: object) -> bool:
    return isinstance(worth, int | float) and math.isfinite(worth)


def _begins(ids: np.ndarray, prefix: np.ndarray) -> bool:
    return np.array_equal(ids[: len(prefix)], prefix)
