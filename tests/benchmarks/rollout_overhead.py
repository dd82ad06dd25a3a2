"""What the platform costs around an instant engine: turns a second of one worker on the SQL environment.

The engine is scripted, in process and answers at once, so that rendering, parsing, the environment and
the episode's record are all that is left. Figures: `turns_per_s`, the median of rounds; `trace_us_per_turn`, the
processor time that its spans take more, files included (median of rounds of 10,000 turns), and `trace_fraction`, that
over the seconds of such a turn. No turn of a run is as short: its engine, journal and trainer come on top.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from agentrl.envs.definition import load_environment
from agentrl.envs.inline import InlineHost
from agentrl.orchestration.transcripts import Teacher
from agentrl.telemetry.span_files import SpanFile
from agentrl.telemetry.spans import Asked, EpisodeTrace, SpanKind
from agentrl.testing.tiny import make_tiny_model, tiny_chat
from agentrl.types.task import Limits
from agentrl_scaffolds.tool_calling import ToolCalling
from tests.benchmarks.report import report

NUM_EPISODES = 400
NUM_ROUNDS = 7
TRACED_TURNS, TURNS_OF_AN_EPISODE = 10_000, 4


async def measure(model: Path) -> list[float]:
    definition = load_environment("sql")
    options = definition.parse_options({})
    teacher = Teacher(
        definition, options, InlineHost(definition, options, 5.0), ToolCalling(), Limits(8, 4096, 512, 5.0, 60.0)
    )
    rates = []
    chat = tiny_chat(model)
    for number in range(NUM_ROUNDS):
        ordinals = range(number * NUM_EPISODES, (number + 1) * NUM_EPISODES)
        started = time.perf_counter()
        episodes = await teacher.play("expert", chat, ordinals, seed=0)
        rates.append(sum(len(e.turns) for e in episodes) / (time.perf_counter() - started))
    return rates


def trace_cost_s(folder: Path) -> float:
    """Processor seconds of one turn's spans, and its part of its episode's, as a worker writes them."""
    costs = []
    for number in range(NUM_ROUNDS):
        sink = SpanFile(folder, f"worker-{number}")
        started = time.process_time()
        for episode in range(TRACED_TURNS // TURNS_OF_AN_EPISODE):
            trace = EpisodeTrace(f"train-{episode:06d}-0", sink)
            for kind in (SpanKind.QUEUE, SpanKind.ENVIRONMENT, SpanKind.SCORING, SpanKind.ENVIRONMENT):
                trace.add(kind, "environment.open", 0.0, 1.0)
            for turn in range(TURNS_OF_AN_EPISODE):
                trace.replied(turn, "agent", [Asked(1.0, 2.0, tokens=40)])
                trace.acted(turn, 2.0, 3.0, ["run_query"])
            trace.close()
        sink.close()
        costs.append((time.process_time() - started) / TRACED_TURNS)
    return statistics.median(costs)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rates = asyncio.run(measure(make_tiny_model(Path(folder) / "model")))
        traced_s = trace_cost_s(Path(folder) / "traces")
    report(
        "rollout_overhead",
        turns_per_s=round(statistics.median(rates)),
        lowest=round(min(rates)),
        trace_us_per_turn=round(1e6 * traced_s, 1),
        trace_fraction=round(traced_s * statistics.median(rates), 4),
        episodes=NUM_EPISODES,
        rounds=NUM_ROUNDS,
    )


if __name__ == "__main__":
    main()
