"""Turns of a tiny policy, and a judge of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.config.base import parse_config
from agentrl.scorers.definition import ScorerSetting
from agentrl.scorers.judge import Judge, JudgeConfig, build_judge
from agentrl.testing.scripted_judge import JudgeScript, ScriptedJudge, scripted_judge
from agentrl.tokens.tokenizer import FastTokenizer
from agentrl.types.turn_score import ScoredTurn, TurnKey, token_digest


def turn_of(model: Path, before: str, reply: str, number: int = 0, episode: str = "sql-000000-0") -> ScoredTurn:
    """A turn of these texts."""
    tokenizer = FastTokenizer.load(model)
    prompt = tokenizer.encode(before)
    ids = np.asarray(prompt + tokenizer.encode(reply), np.int32)
    key = TurnKey(episode, "agent", number, token_digest(ids))
    return ScoredTurn(key, "main", ids, len(prompt), "sql")


def judge_config(url: str, **changes: Any) -> JudgeConfig:
    table = {"kind": "judge", "name": "style", "url": url, "model": "asked-for", "rubric": "Is it polite?"}
    return parse_config(JudgeConfig, {**table, "scale": [0, 10], **changes}, "scorer")


@asynccontextmanager
async def judging(model: Path, script: JudgeScript, **changes: Any) -> AsyncIterator[tuple[Judge, ScriptedJudge]]:
    """A judge that was built without its check, unless that is asked for, and its server."""
    with scripted_judge(script) as server:
        config = judge_config(server.url, **{"check": False, **changes})
        judge = await build_judge(config, ScorerSetting({"main": model}))
        try:
            yield judge, server
        finally:
            await judge.close()
