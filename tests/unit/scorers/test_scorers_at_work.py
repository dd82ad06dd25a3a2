"""A judge and a function as the tier asks them: from its line, the function in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.config.base import parse_config
from agentrl.process.local_place import LocalPlaces
from agentrl.scorers.definition import ScorerSetting, TurnScorerConfig
from agentrl.scorers.turn_function import TurnFunctionConfig
from agentrl.scoring.queue import ScorerQueue
from agentrl.scoring.workers import worker_start
from agentrl.testing.scripted_judge import JudgeFault, JudgeQuestion, JudgeScore, scripted_judge
from tests.unit.scorers.judged import judge_config, turn_of

WAIT_S = 120.0


@asynccontextmanager
async def line_of(config: TurnScorerConfig, setting: ScorerSetting, logs: Path) -> AsyncIterator[ScorerQueue]:
    async def keep(name: str, scores: object) -> None:
        return

    queue = ScorerQueue(config, worker_start(config, setting, logs, LocalPlaces()), keep)
    await queue.open()
    running = asyncio.create_task(queue.run())
    try:
        yield queue
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_turns_that_a_busy_judge_did_not_take_get_their_own_verdicts_later(tiny_model: Path, tmp_path: Path):
    refused: set[str] = set()

    def script(question: JudgeQuestion) -> JudgeScore | JudgeFault:
        if question.reply in refused:
            return JudgeScore(float(question.reply))
        refused.add(question.reply)
        return JudgeFault.BUSY

    turns = [turn_of(tiny_model, "a", str(number), number) for number in range(3)]
    with scripted_judge(script) as server:
        config = judge_config(server.url, check=False, concurrency=1)
        async with line_of(config, ScorerSetting({"main": tiny_model}), tmp_path) as queue:
            async with asyncio.timeout(WAIT_S):
                scores = await asyncio.gather(*(queue.ask(turn) for turn in turns))
            counts = queue.counts.totals
    assert [score.key for score in scores] == [turn.key for turn in turns]
    assert [score.value for score in scores] == [0.0, 0.1, 0.2]
    assert (counts["not_sent"], counts["scored"], counts["failed"]) == (3, 3, 0)


async def test_a_function_judges_in_a_process_of_its_own(tiny_model: Path, tmp_path: Path):
    table = {"kind": "turn_function", "name": "mine", "function": "tests.unit.scorers.own_functions:process_of_mine"}
    config = parse_config(TurnFunctionConfig, table, "scorer")
    async with line_of(config, ScorerSetting({"main": tiny_model}), tmp_path) as queue:
        async with asyncio.timeout(WAIT_S):
            score = await queue.ask(turn_of(tiny_model, "a", "b"))
    assert score.failure is None
    assert score.value == 1.0
