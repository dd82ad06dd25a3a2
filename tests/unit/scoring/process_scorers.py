"""Scorers for processes of their own, which die, hang and fail when a turn's number says so."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from agentrl.scorers.definition import ScorerDefinition, ScorerSetting, TurnScorerConfig
from agentrl.testing.scorers import length_score
from agentrl.types.errors import ConfigError
from agentrl.types.turn_score import ScoredTurn, TurnScore

DIES, HANGS, RAISES, ANSWERS_NONSENSE = 100, 101, 102, 103
KIND = "tests.unit.scoring.process_scorers:moody"


class MoodyConfig(TurnScorerConfig):
    """Where it counts turns, and whether it can be built."""

    kind: Literal["tests.unit.scoring.process_scorers:moody"] = KIND
    count_file: Path
    refuses: bool = False


class Moody:
    def __init__(self, config: MoodyConfig, setting: ScorerSetting) -> None:
        self._file, self._models = config.count_file, setting.models

    async def score(self, turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        for turn in turns:
            with self._file.open("a") as lines:
                lines.write(f"{os.getpid()} {turn.key.turn}\n")
        numbers = [turn.key.turn for turn in turns]
        if DIES in numbers:
            os.kill(os.getpid(), signal.SIGKILL)
        if HANGS in numbers:
            threading.Event().wait()  # it holds its whole process up
        if RAISES in numbers:
            raise ValueError("no verdict")
        if ANSWERS_NONSENSE in numbers:
            return [{"value": 1.0}]  # type: ignore[list-item]
        await asyncio.sleep(0)
        return [length_score(turn, str(self._models["main"])) for turn in turns]

    async def close(self) -> None:
        """Nothing is held."""


async def _build(config: MoodyConfig, setting: ScorerSetting) -> Moody:
    if config.refuses:
        raise ConfigError("no model there")
    return Moody(config, setting)


moody = ScorerDefinition("moody", "dies, hangs and fails as it is told", MoodyConfig, _build, computes=True)
