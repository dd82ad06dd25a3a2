"""Where a scorer works: on the run's event loop, or in processes that may hang or die."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from agentrl.process.parent import CHILD
from agentrl.process.place import Place, PlaceLostError, Places, Role
from agentrl.process.remote import ChildProcess, ProcessDiedError, RemoteCallError
from agentrl.protocols import Closing, Scorer
from agentrl.scorers.config import find_definition
from agentrl.scorers.definition import ScorerSetting, TurnScorerConfig
from agentrl.types.errors import Boundary, ConfigError, EpisodeError, Failure, boundary, deadline
from agentrl.types.turn_score import ScoredTurn, TurnScore

_BUILD_S = 300.0  # importing torch and reading a model, beside all that starts at the same time


class ScoringWorker(Closing, Protocol):
    """Carries out the batches of one scorer; `slots` of them at once."""

    slots: int

    @property
    def is_lost(self) -> bool:
        """Whether another must take its place."""

    async def score(self, turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        """What the scorer says. Raises EpisodeError for the whole batch."""


StartWorker = Callable[[], Awaitable[ScoringWorker]]


class LoopWorker:
    """A scorer on this event loop: it waits for a server, and computes next to nothing."""

    is_lost = False

    def __init__(self, scorer: Scorer, config: TurnScorerConfig) -> None:
        self._scorer = scorer
        self.slots = config.concurrency

    async def score(self, turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        """What the scorer says. Raises EpisodeError for the whole batch."""
        return await self._scorer.score(turns)

    async def close(self) -> None:
        """Close the scorer's connections."""
        await self._scorer.close()


class ProcessWorker:
    """A scorer in a process of its own, which has one batch at a time, and gives its place back when it is over."""

    slots = 1

    def __init__(self, child: ChildProcess, config: TurnScorerConfig, place: Place) -> None:
        self._child, self._config, self._place = child, config, place
        self._is_spoiled = False

    @property
    def is_lost(self) -> bool:
        """Whether its process has ended, or does not answer."""
        return self._is_spoiled or not self._child.is_alive

    async def score(self, turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        """What the scorer says. Raises EpisodeError for the whole batch."""
        limit_s, has_answered = self._config.call_s, False
        try:
            scores = await self._child.call("score", list(turns), result=list[TurnScore], deadline_s=limit_s)
            has_answered = True
            return scores
        except RemoteCallError as error:
            has_answered = True
            failure = error.failure or Failure(Boundary.SCORER, self._config.name, str(error), error.trace)
            raise EpisodeError(failure.boundary, failure.kind, failure.message, failure.trace) from error
        except ProcessDiedError as error:
            raise EpisodeError(Boundary.SCORER, "died", str(error)) from error
        except TimeoutError as error:
            raise EpisodeError(
                Boundary.TIMEOUT, f"scorer.{self._config.name}", f"not done within {limit_s:g} s"
            ) from error
        finally:
            # If no answer has come it may still be at work, and nobody knows for how long.
            self._is_spoiled = not has_answered

    async def close(self) -> None:
        """End the process."""
        if self.is_lost:
            self._child.kill()
        else:
            await self._child.close()
        await self._place.close()


def worker_start(config: TurnScorerConfig, setting: ScorerSetting, logs: Path, places: Places) -> StartWorker:
    """What starts workers of a scorer; it raises ConfigError if there can be none. Raises ConfigError."""
    definition, numbers = find_definition(config.kind), itertools.count(1)

    async def on_loop() -> ScoringWorker:
        async with deadline(f"scorer.{config.name}", _BUILD_S):
            with boundary(Boundary.SCORER, config.name):
                return LoopWorker(await definition.build(config, setting), config)

    async def in_process() -> ScoringWorker:
        name = f"scorer-{config.name}-{next(numbers)}"
        try:
            place = await places.take(Role.SCORER, name, team=f"scorer-{config.name}")
        except PlaceLostError as error:
            raise EpisodeError(Boundary.SCORER, "died", f"{name} did not start: {error}") from error
        try:
            return ProcessWorker(await _start(name, config, setting, logs, place), config, place)
        except BaseException:
            await place.close()
            raise

    return in_process if definition.computes else on_loop


async def _start(name: str, config: TurnScorerConfig, setting: ScorerSetting, logs: Path, place: Place) -> ChildProcess:
    """A process that has built the scorer. Raises ConfigError, or EpisodeError if it did not start."""
    log = logs / f"{name}.log"
    try:
        child = await ChildProcess.start(name, [*CHILD, "agentrl.scoring.process"], log, place=place)
    except PlaceLostError as error:
        raise EpisodeError(Boundary.SCORER, "died", f"{name} did not start: {error}") from error
    try:
        models = {policy: str(folder) for policy, folder in setting.models.items()}
        values = config.model_dump_json()
        await child.call("build", config.kind, values, models, result=type(None), deadline_s=_BUILD_S)
        return child
    except RemoteCallError as error:
        child.kill()
        raise ConfigError(f"scorer '{config.name}': {error.message}") from error
    except (ProcessDiedError, TimeoutError) as error:
        child.kill()
        raise EpisodeError(Boundary.SCORER, "died", f"{name} did not start: {error}") from error
    except BaseException:
        child.kill()
        raise
