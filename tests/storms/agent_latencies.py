"""How long the agents of a run's episodes took, each and together, from its archive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.journal.archive_file import read_consumed
from agentrl.journal.archive_names import archive_files
from agentrl.types.episode import Episode


def latencies(run: Path) -> dict[str, Any]:
    """Seconds: p50 and p90 of what an agent's replies take in an episode, by agent, and of the `joint` episode.

    `p90_joint_over_single` is the joint episode's p90 over that of all agents' taken one by one.
    """
    read = (episode for path in archive_files(run / "episodes") for episode in read_consumed(path))
    episodes = [episode for episode in read if episode.failure is None and episode.turns]
    of_each: dict[str, list[float]] = {}
    for episode in episodes:
        for agent in {turn.agent for turn in episode.turns}:
            of_each.setdefault(agent, []).append(_spent_s(episode, agent))
    joint = [episode.seconds for episode in episodes]
    single = [seconds for of_agent in of_each.values() for seconds in of_agent]
    return {
        "latency_s": {name: _quantiles(found) for name, found in sorted({**of_each, "joint": joint}.items())},
        "p90_joint_over_single": round(float(np.quantile(joint, 0.9) / np.quantile(single, 0.9)), 3),
        "episodes": len(episodes),
    }


def _spent_s(episode: Episode, agent: str) -> float:
    return sum(turn.generation_s for turn in episode.turns if turn.agent == agent)


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": round(float(np.quantile(seconds, percent / 100)), 4) for percent in (50, 90)}
