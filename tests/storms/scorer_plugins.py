"""A scorer of turns with one fault, which counts what it is asked in a file that outlives every process."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from agentrl.scorers.definition import ScorerDefinition, ScorerSetting, TurnScorerConfig
from agentrl.testing.scorers import length_score
from agentrl.types.turn_score import ScoredTurn, TurnScore

NAME = "faulty"
ON_LOOP, APART = "tests.storms.scorer_plugins:on_loop", "tests.storms.scorer_plugins:apart"
VERSION, OTHER_VERSION = "v1", "v2"
_NEVER_SAID = -1.0


class FaultyConfig(TurnScorerConfig):
    """Which fault, how often, and where turns are counted."""

    kind: Literal["tests.storms.scorer_plugins:on_loop", "tests.storms.scorer_plugins:apart"] = ON_LOOP
    count_file: Path
    """One line for each turn of which it is asked; beside it, ``.struck`` has a byte for each batch with a fault."""
    fault: str = ""
    """What happens to batches, of which the first and each after that is struck, up to `strikes`."""
    strikes: int = 0
    latency_s: float = 0.02
    """Seconds of a batch, so that turns wait meanwhile and the next batch has several."""


class FaultyScorer:
    """Says of each turn how long its context is, in a thousandth, unless a batch is struck."""

    def __init__(self, config: FaultyConfig) -> None:
        self._config = config
        self._struck = config.count_file.with_suffix(".struck")
        self._seen: ScoredTurn | None = None

    async def score(self, turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        """Count, wait, answer."""
        _note(self._config.count_file, "".join(f"{line_of(turn)}\n" for turn in turns))
        await asyncio.sleep(self._config.latency_s)
        good = [length_score(turn, VERSION) for turn in turns]
        other, self._seen = self._seen, turns[-1]
        # Some faults show only in batches of several turns, or where there was another turn before.
        if (
            not self._config.fault
            or num_struck(self._struck) >= self._config.strikes
            or len(turns) < 2
            or other is None
        ):
            return good
        _note(self._struck, ".")
        return await _struck(self._config.fault, good, length_score(other, VERSION))

    async def close(self) -> None:
        """Nothing is held."""


async def _struck(fault: str, good: list[TurnScore], of_another: TurnScore) -> list[TurnScore]:
    match fault:
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            threading.Event().wait()  # its whole process
        case "behind":
            await asyncio.Event().wait()
        case "nan":
            return [replace(good[0], value=float("nan"), prior=None), *good[1:]]
        case "wrong_turn":
            return [of_another, *good[1:]][::-1]
        case "twice":
            return [*good, *(replace(score, value=_NEVER_SAID) for score in good)]
        case "version":
            return [good[0], *(replace(score, version=OTHER_VERSION) for score in good[1:])]
    raise ValueError(f"no fault {fault}")


def line_of(turn: ScoredTurn) -> str:
    """How a turn is counted: the process that was asked, episode, turn, digest of its tokens."""
    return f"{os.getpid()} {turn.key.episode_id} {turn.key.turn} {turn.key.digest}"


def num_struck(file: Path) -> int:
    """Batches that were struck so far."""
    return file.stat().st_size if file.is_file() else 0


def _note(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, text.encode())
    os.close(descriptor)


async def _build(config: FaultyConfig, setting: ScorerSetting) -> FaultyScorer:
    return FaultyScorer(config)


on_loop = ScorerDefinition(NAME, "scores by length, with a fault", FaultyConfig, _build)
apart = dataclasses.replace(on_loop, computes=True)
