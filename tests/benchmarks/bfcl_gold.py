"""Whether the reference calls of all 800 multi-turn tasks of BFCL succeed, played as a run plays them.

Each episode is one of the environment `bfcl` in a worker process, with tasks of both splits as a run samples them, and
the expert's calls as JSON. Runs in the Python that has the packages of environments.

Figures: `episodes`, `succeeded`, `calls`, by category `succeeded_of` it, and `seconds`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.benchmarks.report import report

ROOT = Path(__file__).parents[2]
PACKAGES_PYTHON = ROOT / ".venv-packages/bin/python"
ENVIRONMENT = "agentrl_environments.bfcl:definition"
CALL_S = 60.0
MOST_TURNS = 100


async def played(folder: Path) -> dict[str, object]:
    """The figures."""
    from agentrl.checking.players import ExpertPlayer
    from agentrl.checking.playing import play
    from agentrl.envs.config import EnvironmentConfig
    from agentrl.envs.definition import load_environment
    from agentrl.envs.hosting import build_host
    from agentrl.types.task import Split

    definition = load_environment(ENVIRONMENT)
    options = definition.parse_options({})
    host = await build_host(EnvironmentConfig(name=ENVIRONMENT, placement="process"), CALL_S, folder)
    succeeded: Counter[str] = Counter()
    ids: set[str] = set()
    calls = 0
    try:
        num_trained = host.description.num_tasks or 0
        tasks = await host.sample(Split.TRAIN, 0, range(num_trained))
        tasks += await host.sample(Split.HELDOUT, 0, range(800 - num_trained))
        for task in tasks:
            episode = await play(host, task, ExpertPlayer(definition, options, "gold", task, 0), MOST_TURNS)
            ids.add(task.payload["id"])
            calls += sum(len(action.tool_calls) for action in episode.actions)
            category = task.payload["id"].removeprefix("multi_turn_").rpartition("_")[0]
            succeeded[category] += episode.reward == 1.0
    finally:
        await host.close()
    return {"episodes": len(ids), "succeeded": succeeded.total(), "calls": calls, "succeeded_of": dict(succeeded)}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    if importlib.util.find_spec("bfcl_eval") is None:
        path = os.pathsep.join([str(ROOT), str(ROOT / ".venv/packages")])
        command = [str(PACKAGES_PYTHON), "-m", "tests.benchmarks.bfcl_gold"]
        sys.exit(subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=1800).returncode)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(played(Path(folder)))
    report("bfcl_gold", **figures, seconds=round(time.perf_counter() - began, 1))


if __name__ == "__main__":
    main()
