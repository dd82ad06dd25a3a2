"""What rendering a turn costs early and late in an episode: the session must not look at the history.

Figures: `turn_2_ms` and `turn_128_ms`, medians over episodes of a session's own time in that turn, with an
engine that answers at once and every turn adding the same messages.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from agentrl.rollouts.episode_log import NoLog
from agentrl.rollouts.record import EpisodeRecord
from agentrl.rollouts.session import Session
from agentrl.testing.builders import build_ticket
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.tiny import make_tiny_model, tiny_chat
from agentrl.types.episode import Agent
from agentrl.types.generation import Sampling
from agentrl.types.message import Message, Role, ToolCall, ToolSpec
from agentrl.types.task import Limits
from tests.benchmarks.report import report

NUM_EPISODES = 30
NUM_TURNS = 128
TOOLS = (ToolSpec("query", "Run a query."),)
CALL = Message(Role.ASSISTANT, "", (ToolCall("call", "query", {"sql": "select count from name"}),))
RESULT = Message(Role.TOOL, "ada, 17\nbob, 93\ncora, 45", tool_call_id="call")


async def time_turns(session: Session) -> list[float]:
    """Seconds of each turn of one episode."""
    seconds = []
    messages = [Message(Role.USER, "what is the count?")]
    for _ in range(NUM_TURNS):
        started = time.perf_counter()
        await session.generate(messages, TOOLS)
        seconds.append(time.perf_counter() - started)
        messages = [RESULT]
    return seconds


async def measure(model: Path) -> list[list[float]]:
    chat = tiny_chat(model)
    engine = ScriptedEngine(chat, lambda _session, _messages: CALL)
    limits = Limits(NUM_TURNS, 1 << 20, 512, 1.0, 60.0)
    episodes = []
    for number in range(NUM_EPISODES):
        record = EpisodeRecord(build_ticket(f"train-{number}"), (Agent("agent", "main"),))
        episodes.append(await time_turns(Session(record, "agent", chat, engine, Sampling(), limits, NoLog())))
    return episodes[5:]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        episodes = asyncio.run(measure(make_tiny_model(Path(folder) / "model")))
    medians = {turn: 1000 * statistics.median(e[turn - 1] for e in episodes) for turn in (2, NUM_TURNS)}
    report(
        "session_cost",
        turn_2_ms=round(medians[2], 4),
        turn_128_ms=round(medians[NUM_TURNS], 4),
        ratio=round(medians[NUM_TURNS] / medians[2], 3),
        episodes=len(episodes),
    )


if __name__ == "__main__":
    main()
