"""Scorers by script: as slow, as wrong or as dead as a test wants them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from agentrl.scorers.definition import ScorerDefinition, ScorerSetting, TurnScorerConfig
from agentrl.types.turn_score import ScoredTurn, TurnScore

Answer = Callable[[Sequence[ScoredTurn]], Awaitable[Sequence[TurnScore]]]


class ScriptedConfig(TurnScorerConfig):
    """A scorer that says of each turn how long its context is, in a thousandth."""

    kind: Literal["agentrl.testing.scorers:slow", "agentrl.testing.scorers:apart"] = "agentrl.testing.scorers:slow"
    """This kind."""
    latency_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that each batch takes."""


class SlowScorer:
    """Takes its time and says ``len(token_ids) / 1000``; `prior` alike, of the state before the reply."""

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s

    async def score(self, turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        """Waits for: the latency."""
        await asyncio.sleep(self._latency_s)
        return [length_score(turn) for turn in turns]

    async def close(self) -> None:
        """Nothing is held."""


def length_score(turn: ScoredTurn, version: str = "slow") -> TurnScore:
    """What `SlowScorer` says."""
    return TurnScore(turn.key, version, len(turn.token_ids) / 1000, turn.reply_start / 1000)


async def _build(config: ScriptedConfig, setting: ScorerSetting) -> SlowScorer:
    return SlowScorer(config.latency_s)


slow = ScorerDefinition("slow", "scores by length, slowly", ScriptedConfig, _build)
apart = replace(slow, computes=True)
"""The same in a process of its own."""


class FaultyScorer:
    """Answers each batch by the next of its scripts, the last again and again; `batches` has what it was asked."""

    def __init__(self, *scripts: Answer) -> None:
        self._scripts = itertools.chain(scripts, itertools.repeat(scripts[-1]))
        self.batches: list[list[ScoredTurn]] = []

    async def score(self, turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        """What the script says."""
        self.batches.append(list(turns))
        return await next(self._scripts)(turns)

    async def close(self) -> None:
        """Nothing is held."""
