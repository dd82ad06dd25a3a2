"""Scores the turns of a run that has been played by another scorer, without generating anything."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from agentrl import codec
from agentrl.config.base import parse_config
from agentrl.journal.archive_file import read_consumed
from agentrl.journal.archive_names import archive_files
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.orchestration.shutdown import first_failure
from agentrl.process.local_place import LocalPlaces
from agentrl.scorers.config import find_definition
from agentrl.scorers.definition import ScorerSetting, TurnScorerConfig
from agentrl.scoring.queue import ScorerQueue
from agentrl.scoring.trends import correlation
from agentrl.scoring.workers import worker_start
from agentrl.types.episode import Episode
from agentrl.types.errors import ConfigError, EpisodeError, StalledError, StorageError
from agentrl.types.score import scored_turns
from agentrl.types.turn_score import TurnKey, TurnScore

_EPISODES_AT_ONCE = 64
OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Rescored:
    """What became of the turns of a run: scored now, known from an earlier time, or failed, the first of them why.

    `correlation` is of an episode's mean value and its reward; None where either does not vary.

    Example: ``Rescored(Path("runs/x/scores/prm.jsonl"), 4096, 0, 0, "", 512, .61)``.
    """

    file: Path
    scored: int
    known: int
    failed: int
    failure: str
    episodes: int
    correlation: float | None


def scorer_config(run: RunDirectory, scorer: str) -> TurnScorerConfig:
    """A scorer of the run's configuration by its name, or one that is given as a TOML table. Raises ConfigError.

    Example: ``{kind = "prm", name = "prm", model = "models/prm"}``.
    """
    if not scorer.lstrip().startswith("{"):
        found = {s.name: s for s in run.config().turn_scorers()}
        if scorer not in found:
            names = ", ".join(found) or "none of turns"
            raise ConfigError(f"the run has no scorer '{scorer}' of turns ({names}); name one, or give a table")
        return found[scorer]
    try:
        table: dict[str, Any] = msgspec.toml.decode(f"scorer = {scorer}")["scorer"]
    except msgspec.DecodeError as error:
        raise ConfigError(f"--scorer is no TOML table: {error}") from error
    if "kind" not in table:
        raise ConfigError("--scorer: kind is missing")
    config: TurnScorerConfig = parse_config(find_definition(str(table["kind"])).config, table, "--scorer")
    return config


async def rescore(run: RunDirectory, config: TurnScorerConfig, on_progress: OnProgress) -> Rescored:
    """Have the turns of all archived episodes scored; those that the run's file of this scorer has are not asked about.

    Waits for: the scorer, some episodes at a time. Unblocked by: its answers, its deadline for each batch, or the end
    of its patience.

    Raises:
        ConfigError: there is no episode, or the scorer cannot score this run.
        StalledError: the scorer has not scored a turn within its patience.
        StorageError: the archive cannot be read, or the scores cannot be written.
    """
    file = run.path / "scores" / f"{config.name}.jsonl"
    tally = _Tally(file, {score.key: score for score in _read(file)})
    async with _queue(run, config, tally) as queue:
        async for episodes, where in _read_episodes(run):
            for episode in episodes:
                tally.begin(queue, config, episode)
            await tally.settle(config)
            on_progress(*where)
    if not tally.episodes:
        raise ConfigError(f"the archive of {run.path} holds no episode; it has some once the run has trained on them")
    return tally.result()


async def _read_episodes(run: RunDirectory) -> AsyncIterator[tuple[list[Episode], tuple[int, int, str]]]:
    """Archived episodes, some at a time, each with how far that is. Raises StorageError."""
    files = archive_files(run.episodes)
    for number, path in enumerate(files, 1):
        episodes = await asyncio.to_thread(read_consumed, path)
        for first in range(0, len(episodes), _EPISODES_AT_ONCE):
            some = episodes[first : first + _EPISODES_AT_ONCE]
            yield some, (first + len(some), len(episodes), f"file {number} of {len(files)}")


class _Tally:
    """Collects the scores of episodes, and keeps new ones in the file."""

    def __init__(self, file: Path, known: dict[TurnKey, TurnScore]) -> None:
        self._file, self._known = file, known
        self._open: list[tuple[Episode, list[TurnScore], list[asyncio.Future[TurnScore]]]] = []
        self._pairs: list[tuple[float, float]] = []
        self._scored = self._num_known = self._failed = self.episodes = 0
        self._failure = ""

    def begin(self, queue: ScorerQueue, config: TurnScorerConfig, episode: Episode) -> None:
        """Ask about an episode's turns that are not known."""
        self.episodes += 1
        turns = [turn for turn in scored_turns(episode) if not config.policies or turn.policy in config.policies]
        known = [self._known[turn.key] for turn in turns if turn.key in self._known]
        self._num_known += len(known)
        self._open.append((episode, known, [queue.ask(turn) for turn in turns if turn.key not in self._known]))

    async def settle(self, config: TurnScorerConfig) -> None:
        """Waits for: the scores asked for. Unblocked by: the scorer's answers, its deadline for each batch, or its
        patience if there is none. Raises StalledError.
        """
        waiting = {score for _, _, asked in self._open for score in asked}
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=config.patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise StalledError(
                    f"scorer '{config.name}' has not scored a turn within patience_s = {config.patience_s:g}: mend it "
                    f"and call again; what it said is in {self._file}"
                )
        for episode, scores, asked in self._open:
            answers = [score.result() for score in asked]
            failures = [answer.failure for answer in answers if answer.failure is not None]
            self._failed += len(failures)
            self._failure = self._failure or next(map(str, failures), "")
            self._scored += len(answers) - len(failures)
            values = [score.value for score in (*scores, *answers) if score.value is not None]
            if values and episode.reward is not None:
                self._pairs.append((fmean(values), episode.reward))
        self._open.clear()

    async def keep(self, scorer: str, scores: Sequence[TurnScore]) -> None:
        """Append scores to the file. Raises StorageError."""
        lines = b"".join(codec.to_json(score) + b"\n" for score in scores)
        try:
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("ab") as file:
                file.write(lines)
        except OSError as error:
            raise StorageError(f"{self._file} cannot be written: {error}") from error

    def result(self) -> Rescored:
        """What was found."""
        values, outcomes = [a for a, _ in self._pairs], [b for _, b in self._pairs]
        r = correlation(values, outcomes) if len(values) > 1 else None
        return Rescored(self._file, self._scored, self._num_known, self._failed, self._failure, self.episodes, r)


@asynccontextmanager
async def _queue(run: RunDirectory, config: TurnScorerConfig, tally: _Tally) -> AsyncIterator[ScorerQueue]:
    """The scorer, at work. Raises ConfigError, and what its line or the block raises, by itself."""
    if asked := [name for name in (*config.uses_policies(), config.snapshots_of()) if name]:
        raise ConfigError(
            f"scorer '{config.name}' asks engines of {', '.join(asked)}, which only a run starts; give a table of kind "
            "teacher with a url instead"
        )
    policies = config.policies or run.config().policies
    models = {policy: run.newest_model(policy) for policy in policies}
    run.logs.mkdir(exist_ok=True)
    queue = ScorerQueue(config, worker_start(config, ScorerSetting(models), run.logs, LocalPlaces()), tally.keep)
    try:
        await queue.open()
    except EpisodeError as error:
        raise ConfigError(str(error)) from error
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(queue.run(), name="rescore")
            try:
                yield queue
            finally:
                running.cancel()
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None


def _read(file: Path) -> Iterator[TurnScore]:
    """The scores of an earlier time; an unfinished last line is cut off, so that the next begins a line of its own.

    Raises StorageError.
    """
    if not file.is_file():
        return
    lines = file.read_bytes().split(b"\n")
    unfinished = lines.pop()
    if unfinished:
        os.truncate(file, file.stat().st_size - len(unfinished))
    for number, line in enumerate(lines, 1):
        try:
            yield codec.from_json(line, TurnScore)
        except msgspec.DecodeError as error:
            raise StorageError(
                f"line {number} of {file} is damaged: {error}; move the file away to have all turns scored anew"
            ) from error
