"""What a durable turn costs: how many a second one process commits while 64 episodes wait for theirs, and a run.

Each episode packs a turn of 100 sampled tokens with their log-probabilities and goes on once it is synced. Figures:
`commits_per_s`, `syncs` (one serves all that wait) and `p50_ms` and `p99_ms`, from packing to acknowledgement.
The journal lies in `--folder`, which must be on the disk in question and not in memory. Then the same training runs
with and without a journal, in turn: `overhead_fraction` and its companions are explained in `journal_overhead`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from agentrl.journal.claim import Claim
from agentrl.journal.config import JournalConfig
from agentrl.journal.entries import pack
from agentrl.journal.writer import JournalWriter
from agentrl.process.loop import run_async
from tests.benchmarks.journal_load import turned
from tests.benchmarks.journal_overhead import RECIPE, ROUNDS, STEPS, Workload, measure_overhead
from tests.benchmarks.report import report
from tests.storms.kill_runs import warm_start

NUM_EPISODES = 64
TURNS_EACH = 2_000
WARM_UP_TURNS = 100
TURNS = [turned(number) for number in range(32)]


async def commit_turns(writer: JournalWriter, episode_id: str, count: int) -> list[float]:
    """Commit one turn after the other; how many seconds each took."""
    seconds = []
    for number in range(count):
        started = time.perf_counter()
        await writer.append(*pack(episode_id, TURNS[number % len(TURNS)]))
        seconds.append(time.perf_counter() - started)
    return seconds


async def commit_together(writer: JournalWriter, count: int) -> list[float]:
    """All episodes at once."""
    episodes = await asyncio.gather(*(commit_turns(writer, f"train-{n:06d}-0", count) for n in range(NUM_EPISODES)))
    return [seconds for episode in episodes for seconds in episode]


async def measure(folder: Path) -> dict[str, float]:
    claim = Claim.take(folder / "journal")
    writer = JournalWriter(claim.folder, "worker", check_right=claim.check, gather_s=JournalConfig().gather_s)
    await commit_together(writer, WARM_UP_TURNS)
    syncs, started = writer.syncs, time.perf_counter()
    seconds = await commit_together(writer, TURNS_EACH)
    elapsed = time.perf_counter() - started
    percentiles = statistics.quantiles(seconds, n=100)
    await writer.close()
    return {
        "commits_per_s": round(len(seconds) / elapsed),
        "syncs": writer.syncs - syncs,
        "p50_ms": round(1000 * percentiles[49], 3),
        "p99_ms": round(1000 * percentiles[98], 3),
        "commits": len(seconds),
        "bytes_per_commit": len(pack("train-000000-0", TURNS[0])[2]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where the journal is made, then deleted")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="the run that is played with and without a journal")
    parser.add_argument("--model", type=Path, help="its warm-started model; made for the occasion by default")
    parser.add_argument("--steps", type=int, default=STEPS, help="how long each run is")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="runs with a journal, and as many without")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix=".journal-") as folder:
        figures = run_async(measure(Path(folder)))
        work = Workload(arguments.recipe, arguments.steps, arguments.model or warm_start(Path(folder)))
        overhead = measure_overhead(Path(folder), work, arguments.rounds)
    report("journal_rate", **figures, **overhead, recipe=arguments.recipe.name)


if __name__ == "__main__":
    main()
