"""What the platform costs around an instant engine: turns a second of one worker on the SQL environment.

The engine is scripted, in process and answers at once, so that rendering, parsing, the environment and
the episode's record are all that is left. Figure: `turns_per_s`, the median of rounds.
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
from agentrl.testing.tiny import make_tiny_model, tiny_chat
from agentrl.types.task import Limits
from agentrl_scaffolds.tool_calling import ToolCalling
from tests.benchmarks.report import report

NUM_EPISODES = 400
NUM_ROUNDS = 7


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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rates = asyncio.run(measure(make_tiny_model(Path(folder) / "model")))
    report(
        "rollout_overhead",
        turns_per_s=round(statistics.median(rates)),
        lowest=round(min(rates)),
        episodes=NUM_EPISODES,
        rounds=NUM_ROUNDS,
    )


if __name__ == "__main__":
    main()
