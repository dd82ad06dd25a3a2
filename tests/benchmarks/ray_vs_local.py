"""The demo's recipe on two nodes of a Ray cluster and on one machine; and what a turn costs on either.

The nodes are virtual machines on this one, so root is needed. Two engines, two rollout workers, the same warm-started
model and seed. Figures: `success_ray` and `success_local` on 600 held-out tasks at the end, with `standard_error` of
their difference.

`turn_cost_ratio` is the processor time of a turn under Ray, of all processes, raylets and the head's included, to that
under the local runtime: 256 episodes at once in two worker processes, with a journal and a scripted engine inside each
worker, so that no token crosses a border. At most 1.5 is wanted. Medians of rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from agentrl.cli.demo import warm_start
from agentrl.cluster.config import RayRuntimeConfig
from agentrl.cluster.places import RayPlaces
from agentrl.process.local_place import LocalPlaces
from agentrl.process.loop import run_async
from agentrl.process.place import Places
from agentrl.telemetry.json_lines import read_json_lines
from agentrl.testing.tiny import make_tiny_model
from agentrl.testing.virtual_cluster import VirtualCluster
from tests.benchmarks.report import report
from tests.storms.in_turn import family, processor_s
from tests.storms.scripted_worker import ScriptedPlaces
from tests.storms.worker_pools import DIALOGUE, PlayedPool, make_run, nothing, playing

AT_ONCE = 256
NUM_ROUNDS = 7
NUM_STARTS = 2
_CPUS = 6
_OVERRIDES = ("rollout.workers=2", "policies.main.engine.count=2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="warm-started model; without it one is made")
    parser.add_argument("--only", choices=("cost", "success"), help="one half of the figures")
    arguments = parser.parse_args()
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="agentrl-ray-") as name:
        folder = Path(name)
        with VirtualCluster.start(2, cpus=_CPUS, shared=[folder]) as cluster:
            if arguments.only != "cost":
                figures |= success_figures(cluster, folder, arguments.seed, arguments.model)
            if arguments.only != "success":
                figures |= run_async(cost_figures(cluster, folder))
    report("ray_vs_local", **figures, seed=arguments.seed)


def success_figures(cluster: VirtualCluster, folder: Path, seed: int, model: Path | None) -> dict[str, object]:
    """What both runs reach."""
    copy = folder / "model"
    if model is None:
        warm_start(seed, copy)
    else:
        subprocess.run(["cp", "-r", model, copy], check=True)  # nodes see nothing else below /tmp
    given = f"policies.main.model={copy}", f"seed={seed}", f"runs_folder={folder / 'runs'}", *_OVERRIDES
    under_ray = "runtime.kind=ray", f"runtime.address={cluster.address}"
    reached, errors, seconds = {}, [], {}
    for name, runtime in (("ray", under_ray), ("local", ())):
        started = time.monotonic()
        _train(f"name={name}", *given, *runtime)
        rows = read_json_lines(folder / "runs" / f"{name}-seed{seed}" / "metrics.jsonl")
        last = [row for row in rows if "eval/reward_mean" in row][-1]
        reached[f"success_{name}"] = round(last["eval/reward_mean"], 4)
        errors.append(last["eval/reward_standard_error"])
        seconds[name] = round(time.monotonic() - started)
    return {**reached, "standard_error": round(math.hypot(*errors), 4), "seconds": seconds}


def _train(*overrides: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "agentrl.cli.main", "train", "sql/demo", *overrides],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=sys.stderr,
    )


async def cost_figures(cluster: VirtualCluster, folder: Path) -> dict[str, object]:
    """What a turn costs, by turns under either runtime."""
    model = make_tiny_model(folder / "tiny")
    rounds: dict[str, list[float]] = {"ray": [], "local": []}
    for number in range(NUM_STARTS):
        for name, costs in rounds.items():
            config = RayRuntimeConfig(kind="ray", address=cluster.address)
            places = RayPlaces.open(config) if name == "ray" else LocalPlaces()
            try:
                costs += await _costs(model, folder / f"{name}-{number}", places)
            finally:  # Ray ends a driver without a word whose cluster is gone before it
                await places.close()
    medians = {name: statistics.median(costs) for name, costs in rounds.items()}
    return {
        "turn_cost_ratio": round(medians["ray"] / medians["local"], 2),
        "processor_us_a_turn": {name: round(1e6 * cost) for name, cost in medians.items()},
    }


async def _costs(model: Path, folder: Path, places: Places) -> list[float]:
    """Processor seconds of a turn in each round but the first."""
    run = make_run(model, folder, environment={"name": "sql", "options": {}}, rollout={"workers": 2})
    idle = family(os.getpid()) - {os.getpid()} if isinstance(places, LocalPlaces) else set()
    async with playing(run, places=ScriptedPlaces(places)) as pool:
        starts = range(0, NUM_ROUNDS * AT_ONCE, AT_ONCE)
        costs = [await _play(pool, range(first, first + AT_ONCE), idle) for first in starts]
    return costs[1:]


async def _play(pool: PlayedPool, numbers: Sequence[int], idle: set[int]) -> float:
    """Processor seconds of a turn of episodes that are played at once; of all our processes but `idle` ones."""
    tickets = [pool.ticket(number) for number in numbers]  # samples tasks, which costs as much as a turn
    before = processor_s(family(os.getpid()) - idle)
    episodes = await asyncio.gather(*(pool.pool.play(ticket, (), nothing) for ticket in tickets))
    after = processor_s(family(os.getpid()) - idle)
    assert all(episode.failure is None for episode in episodes)
    assert all(len(episode.turns) == len(DIALOGUE) for episode in episodes)
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items()) / (len(tickets) * len(DIALOGUE))


if __name__ == "__main__":
    main()
