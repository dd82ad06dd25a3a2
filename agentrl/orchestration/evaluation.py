"""Evaluation on held-out tasks at a pinned version, on an engine apart from the rollouts'."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.protocols import Engine, WeightTransport
from agentrl.rollouts.runner import EpisodeRunner
from agentrl.types.batch import WeightsManifest
from agentrl.types.episode import Episode, Ticket
from agentrl.types.errors import StalledError
from agentrl.types.task import Task
from agentrl.types.version import PolicyVersion
from agentrl.weights.receipts import check_receipt


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a version did on held-out tasks.

    Failed episodes (environment or engine) are left out of the mean and counted. The same tasks are
    drawn with the same random numbers at every version, so two evaluations differ by the policy.
    """

    version: PolicyVersion
    rewards: tuple[float, ...]
    num_failed: int
    turns: float
    seconds: float
    sample: tuple[Episode, ...]

    @property
    def mean(self) -> float:
        """Mean reward."""
        return sum(self.rewards) / len(self.rewards)

    @property
    def standard_error(self) -> float:
        """Standard error of the mean."""
        variance = sum((reward - self.mean) ** 2 for reward in self.rewards) / len(self.rewards)
        return math.sqrt(variance / len(self.rewards))

    def metrics(self) -> dict[str, float]:
        """Scalars under ``eval/``."""
        return {
            "eval/reward_mean": self.mean,
            "eval/reward_standard_error": self.standard_error,
            "eval/episodes": float(len(self.rewards)),
            "eval/failed_episodes": float(self.num_failed),
            "eval/turns_mean": self.turns,
            "time/evaluation_s": self.seconds,
        }


class Evaluator:
    """Plays held-out tasks on one engine; its weights change only here, between evaluations."""

    def __init__(
        self,
        policy: str,
        engine: Engine,
        transport: WeightTransport,
        runner: EpisodeRunner,
        sample_task: Callable[[int], Task],
        concurrency: int,
    ) -> None:
        self._policy, self._engine, self._transport = policy, engine, transport
        self._runner, self._sample_task = runner, sample_task
        self._concurrency = concurrency

    async def load(self, manifest: WeightsManifest) -> None:
        """Bring a version to the engine and check its receipt. Raises EngineError."""
        await self._engine.pause()
        await self._transport.send(self._engine, manifest)
        check_receipt(await self._engine.receipt(), manifest)
        await self._engine.resume()

    async def run(
        self, version: PolicyVersion, num_tasks: int, on_episode: Callable[[int], None] = lambda done: None
    ) -> Evaluation:
        """Play the first `num_tasks` held-out tasks with the weights that are loaded.

        Waits for: all episodes. Unblocked by: their ends or deadlines.

        Raises:
            StalledError: every episode failed.
        """
        started = time.monotonic()
        places = asyncio.Semaphore(self._concurrency)
        done = 0

        async def play(ordinal: int) -> Episode:
            nonlocal done
            async with places:
                episode = await self._runner.run(self._runner.open(self._ticket(ordinal, version)), _nothing)
            done += 1
            on_episode(done)
            return episode

        episodes = await asyncio.gather(*(play(ordinal) for ordinal in range(num_tasks)))
        scored = [e for e in episodes if e.failure is None and e.reward is not None]
        if not scored:
            raise StalledError(f"all {num_tasks} evaluation episodes failed; the last: {episodes[-1].failure}")
        return Evaluation(
            version=version,
            rewards=tuple(float(e.reward or 0.0) for e in scored),
            num_failed=len(episodes) - len(scored),
            turns=sum(len(e.turns) for e in scored) / len(scored),
            seconds=time.monotonic() - started,
            sample=tuple(episodes[:8]),
        )

    def _ticket(self, ordinal: int, version: PolicyVersion) -> Ticket:
        name = f"heldout-{ordinal:06d}"
        seed = hashlib.blake2b(name.encode(), digest_size=6).digest()
        return Ticket(
            name, self._sample_task(ordinal), ordinal, 0, 0, int.from_bytes(seed, "little"), {self._policy: version}
        )


async def _nothing() -> None:
    """An evaluation's episodes hold no place in the buffer."""
