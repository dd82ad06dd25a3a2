"""Functions of a recipe's author."""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from agentrl.types.turn_score import ScoredTurn, TurnScore

meeting = asyncio.Barrier(3)
NUMBER = 3


def reply_share(turn: ScoredTurn) -> float:
    return turn.num_reply_tokens / len(turn.token_ids)


def numpy_share(turn: ScoredTurn) -> np.float32:
    return np.float32(0.25)


def both(turn: ScoredTurn) -> TurnScore:
    return TurnScore(turn.key, "mine:7", value=0.5, prior=0.25, note="half")


async def three_at_once(turn: ScoredTurn) -> float:
    await meeting.wait()
    return 1.0


def fails_at_short_ones(turn: ScoredTurn) -> float:
    if turn.num_reply_tokens < 3:
        raise KeyError("too short")
    return 1.0


def says_yes(turn: ScoredTurn) -> bool:
    return True


def says_nothing(turn: ScoredTurn) -> None:
    return None


def process_of_mine(turn: ScoredTurn) -> float:
    """1 where the module that asked for it was never imported: in another process than the test's."""
    return float("tests.unit.scorers.test_scorers_at_work" not in sys.modules)
