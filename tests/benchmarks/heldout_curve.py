"""Success of many weights of one model on the same held-out tasks, by one engine that loads them in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from agentrl.orchestration.assembly import start_evaluator
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.evaluation import Evaluation
from agentrl.orchestration.players import build_hosts
from agentrl.orchestration.runtime import ProcessRuntime
from agentrl.process.local_place import LocalPlaces
from agentrl.tokens.chat import ChatFormat
from agentrl.types.batch import WeightsManifest
from agentrl.types.version import PolicyVersion


async def heldout_curve(
    config: RunConfig, model: Path, folders: Sequence[Path], num_tasks: int, enough: float, logs: Path
) -> list[float]:
    """Mean reward of a model, then of the weights in each folder, up to the first that reaches `enough`.

    Raises SystemExit if an episode fails: a mean without it would be of other tasks.
    """
    logs.mkdir(parents=True, exist_ok=True)
    (name,) = config.policies
    places = LocalPlaces()
    runtime = ProcessRuntime(config, logs, places)
    hosts = await build_hosts(config, logs)
    chat = ChatFormat.load(model, config.policies[name].chat)
    first = PolicyVersion(0, 0)
    try:
        evaluator = await start_evaluator(
            config, logs, places, runtime, {name: chat}, hosts, {name: model}, {name: first}
        )
        means = [_mean(await evaluator.run(name, first, num_tasks))]
        for step, folder in enumerate(folders, start=1):
            version = PolicyVersion(0, step)
            await evaluator.load(WeightsManifest(name, version, str(folder.resolve()), {}, 0))
            means.append(_mean(await evaluator.run(name, version, num_tasks)))
            if means[-1] >= enough:
                break
    finally:
        await runtime.close()
        await asyncio.gather(*(host.close() for host in hosts.values()))
    return means


def _mean(evaluation: Evaluation) -> float:
    if evaluation.num_failed:
        raise SystemExit(f"{evaluation.num_failed} held-out episodes failed at version {evaluation.version}")
    return evaluation.mean


def crossing(values: Sequence[float], level: float) -> float | None:
    """Where values, at 0, 1, 2 and so on, first reach a level, interpolated; None if they never do.

    Example: ``crossing([0.2, 0.8, 1.0], 0.9)`` is 1.5.
    """
    for step, value in enumerate(values):
        if value >= level:
            before = values[step - 1] if step else value
            return float(step) if value == before else step - 1 + (level - before) / (value - before)
    return None
