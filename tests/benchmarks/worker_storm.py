"""Three worker processes of a run are killed at random, 60 times; and what a turn costs in processes.

Figures of the storm: `workers`, `kills`, `turns_lost`, `effects_twice`, `regenerated` (turns made again), `ledger_gaps`
once the run has finished, what `RunAccount` counts then in Parquet and JSON, `handed_over` episodes.
`found_without_protection`: with tokens that do not rise when an episode goes to another worker, turns are lost.

`processor_ratio` is the processor time of a turn with two worker processes, driver and workers together, to that of
one in the driver's process, around an instant engine and with a journal; at most 1.3 is wanted. `rate_ratio` is that of
turns a second, on as many cores as the machine has.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from agentrl.process.loop import run_async
from agentrl.testing.tiny import make_tiny_model
from tests.benchmarks.report import report
from tests.storms.kill_runs import warm_start
from tests.storms.worker_pools import DIALOGUE, PlayedPool, make_run, playing
from tests.storms.worker_storm import NUM_WORKERS, found_without_tokens, kill_workers, metric

NUM_KILLS = 60
NUM_ROUNDS = 5
NUM_EPISODES = 256
_AT_ONCE = 64
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def processor_s(pid: int) -> float:
    """Processor time of a process so far, its ended children left out."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND


async def play_round(pool: PlayedPool, first: int) -> tuple[float, float]:
    """Processor seconds and seconds of a turn; driver and workers together."""
    workers = pool.processes()
    before, started = sum(map(processor_s, [os.getpid(), *workers])), time.perf_counter()
    for number in range(first, first + NUM_EPISODES, _AT_ONCE):
        episodes = await pool.play(range(number, number + _AT_ONCE))
        assert all(episode.failure is None for episode in episodes)
    seconds, used = time.perf_counter() - started, sum(map(processor_s, [os.getpid(), *workers])) - before
    turns = NUM_EPISODES * len(DIALOGUE)
    return used / turns, seconds / turns


async def measure(folder: Path) -> dict[int, list[tuple[float, float]]]:
    """Rounds by number of processes, in turn."""
    model = make_tiny_model(folder / "model")
    rounds: dict[int, list[tuple[float, float]]] = {0: [], 2: []}
    for number in range(NUM_ROUNDS):
        for workers, found in rounds.items():
            name = folder / f"{number}-{workers}"
            run = make_run(model, name, environment={"name": "sql", "options": {}}, rollout={"workers": workers})
            async with playing(run) as pool:
                await pool.play(range(100_000, 100_000 + _AT_ONCE))
                found.append(await play_round(pool, 0))
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=NUM_KILLS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentrl-workers-") as name:
        folder = Path(name)
        rounds = run_async(measure(folder))
        figures = cost_figures(rounds)
        if arguments.kills:
            figures |= storm_figures(folder, arguments.kills, arguments.seed)
    report("worker_storm", **figures, seed=arguments.seed)


def cost_figures(rounds: dict[int, list[tuple[float, float]]]) -> dict[str, object]:
    """Medians over the rounds."""
    used = {workers: statistics.median(cost for cost, _ in found) for workers, found in rounds.items()}
    took = {workers: statistics.median(seconds for _, seconds in found) for workers, found in rounds.items()}
    return {
        "processor_ratio": round(used[2] / used[0], 2),
        "processor_us_a_turn": {workers: round(1e6 * cost) for workers, cost in used.items()},
        "rate_ratio": round(took[0] / took[2], 2),
        "turns_per_s": {workers: round(1 / seconds) for workers, seconds in took.items()},
    }


def storm_figures(folder: Path, num_kills: int, seed: int) -> dict[str, object]:
    """What the kills did."""
    (folder / "calling").mkdir()
    model = warm_start(folder / "calling")
    run = kill_workers(folder / "storm", model, num_kills, seed)
    found = found_without_tokens(folder / "unprotected", model, seed)
    verdict = run.verdict
    return {
        "workers": NUM_WORKERS,
        "kills": num_kills,
        "turns_lost": verdict.turns_lost,
        "effects_twice": verdict.effects_twice,
        "regenerated": verdict.regenerated,
        "ledger_gaps": verdict.ledger_gaps,
        **asdict(run.account),
        "episodes": verdict.num_episodes,
        "calls": verdict.num_turns,
        "handed_over": metric(run, "workers/handed_over_total"),
        "found_without_protection": found > 0,
        "kills_until_found": found,
    }


if __name__ == "__main__":
    main()
