"""Evaluation on held-out tasks at pinned versions, on engines apart from the rollouts'."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from agentrl.orchestration.scoring import Scoring
from agentrl.orchestration.worker_pool import WorkerPool
from agentrl.protocols import Engine, EnvironmentHost, WeightTransport
from agentrl.types.batch import WeightsManifest
from agentrl.types.episode import Episode, Ticket
from agentrl.types.errors import (
    Boundary,
    ConfigError,
    EngineError,
    EngineRefusedError,
    EnginesLostError,
    Failure,
    StalledError,
)
from agentrl.types.task import Split, Task
from agentrl.types.version import PolicyVersion
from agentrl.weights.receipts import check_receipt


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a version of a policy did on held-out tasks.

    `by_environment` has the rewards of the policy's agents in each environment. Failed episodes (environment or
    engine) are left out of the mean and counted. The same tasks are drawn with the same random numbers at every
    version, so two evaluations differ by the policy, and by what the others of its environments have learned.
    """

    version: PolicyVersion
    by_environment: dict[str, tuple[float, ...]]
    num_failed: int
    turns: float
    seconds: float
    sample: tuple[Episode, ...]
    policy: str = "main"

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of all environments."""
        return tuple(reward for rewards in self.by_environment.values() for reward in rewards)

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
        """Scalars under ``eval/``; of several environments each one's mean, too."""
        several = self.by_environment if len(self.by_environment) > 1 else {}
        return {
            "eval/reward_mean": self.mean,
            "eval/reward_standard_error": self.standard_error,
            "eval/episodes": float(len(self.rewards)),
            "eval/failed_episodes": float(self.num_failed),
            "eval/turns_mean": self.turns,
            "time/evaluation_s": self.seconds,
            **{f"eval/{name}/reward_mean": sum(r) / len(r) for name, r in several.items() if r},
        }


@dataclass(frozen=True, slots=True)
class Exam:
    """What an evaluator plays, and by whom: hosts by environment, and the policies that are trained in each."""

    pool: WorkerPool
    hosts: Mapping[str, EnvironmentHost]
    policies: Mapping[str, tuple[str, ...]]
    seed: int
    concurrency: int


class Evaluator:
    """Plays held-out tasks on an engine for each policy; their weights change only here, between evaluations."""

    def __init__(
        self, engines: Mapping[str, Engine], transports: Mapping[str, WeightTransport], exam: Exam, scoring: Scoring
    ) -> None:
        self._engines, self._transports = dict(engines), dict(transports)
        self._exam, self._scoring = exam, scoring
        self._loaded: dict[str, PolicyVersion] = {}

    async def load(self, manifest: WeightsManifest) -> None:
        """Bring a version to its policy's engine and check its receipt, unless it is there.

        Raises:
            EnginesLostError: the engine does not answer.
            EngineError: it answers otherwise than it should.
        """
        if self._loaded.get(manifest.policy) == manifest.version:
            return
        engine = self._engines[manifest.policy]
        with _lost_if_silent():
            await engine.pause()
            await self._transports[manifest.policy].send(engine, manifest)
            receipt = await engine.receipt()
        check_receipt(receipt, manifest)
        with _lost_if_silent():
            await engine.resume()
        self._loaded[manifest.policy] = manifest.version

    async def run(
        self,
        policy: str,
        version: PolicyVersion,
        num_tasks: int,
        on_episode: Callable[[int, int], None] = lambda done, total: None,
    ) -> Evaluation:
        """Play the first `num_tasks` held-out tasks of each environment of a policy with the weights that are loaded.

        `on_episode` hears how many episodes are over, and of how many. Waits for: all episodes. Unblocked by: their
        ends or deadlines.

        Raises:
            ConfigError: the policy has no environment that is evaluated.
            EnginesLostError: no episode reached its engine, which may be known before the end of its machine is.
            StalledError: every episode failed by something else, too.
        """
        started = time.monotonic()
        names = [name for name, policies in self._exam.policies.items() if policy in policies]
        if not names:
            raise ConfigError(f"no environment in which policy '{policy}' is trained has evaluated = true")
        episodes = await self.play(names, {**self._loaded, policy: version}, num_tasks, Split.HELDOUT, on_episode)
        scored = [e for e in episodes if e.failure is None and e.reward is not None]
        if not scored:
            failures = [episode.failure for episode in episodes]
            raise _error_of(failures)(f"all {len(failures)} evaluation episodes failed; the last: {failures[-1]}")
        return Evaluation(
            version=version,
            by_environment={
                name: _rewards((e for e in scored if e.ticket.environment == name), policy) for name in names
            },
            num_failed=len(episodes) - len(scored),
            turns=sum(len(e.turns) for e in scored) / len(scored),
            seconds=time.monotonic() - started,
            sample=tuple(episodes[:8]),
            policy=policy,
        )

    async def play(
        self,
        environments: Sequence[str],
        versions: dict[str, PolicyVersion],
        num_tasks: int,
        split: Split,
        on_episode: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Episode]:
        """One episode of each of the first `num_tasks` tasks of a split in each environment, failed ones included.

        Waits for: all episodes. Unblocked by: their ends or deadlines.
        """
        tickets = await self._tickets(environments, versions, num_tasks, split)
        places, done = asyncio.Semaphore(self._exam.concurrency), 0

        async def play_one(ticket: Ticket) -> Episode:
            nonlocal done
            async with places:
                played = await self._exam.pool.play(ticket, (), _nothing)
                episode = await self._scoring.add_recorded(await self._scoring.complete(played))
            done += 1
            on_episode(done, len(tickets))
            return episode

        async with self._exam.pool.running():
            return await asyncio.gather(*(play_one(ticket) for ticket in tickets))

    async def _tickets(
        self, environments: Sequence[str], versions: dict[str, PolicyVersion], num_tasks: int, split: Split
    ) -> list[Ticket]:
        """Each environment's tasks in turn: an episode has the same number however many tasks there are."""
        sampled = [
            await self._exam.hosts[name].sample(split, self._exam.seed, range(num_tasks)) for name in environments
        ]
        rounds = (zip(environments, tasks, strict=True) for tasks in zip(*sampled, strict=True))
        turns = (turn for of_round in rounds for turn in of_round)
        return [_ticket(f"{split}-{number:06d}", number, *turn, versions) for number, turn in enumerate(turns)]


@contextmanager
def _lost_if_silent() -> Iterator[None]:
    """Raises EnginesLostError for an engine that does not answer; what it refuses is its own error."""
    try:
        yield
    except EngineRefusedError:
        raise
    except EngineError as error:
        raise EnginesLostError(f"the engine of the evaluation does not answer: {error}") from error


def _error_of(failures: Sequence[Failure | None]) -> type[StalledError | EnginesLostError]:
    causes = {(failure.boundary, failure.kind) for failure in failures if failure is not None}
    return EnginesLostError if causes == {(Boundary.ENGINE, "unreachable")} else StalledError


def _ticket(name: str, number: int, environment: str, task: Task, versions: dict[str, PolicyVersion]) -> Ticket:
    seed = hashlib.blake2b(name.encode(), digest_size=6).digest()
    return Ticket(name, task, number, 0, 0, int.from_bytes(seed, "little"), versions, environment)


def _rewards(scored: Iterable[Episode], policy: str) -> tuple[float, ...]:
    """A policy's reward in each episode: the mean over its agents."""
    of_each = (episode.rewards_of(policy).values() for episode in scored)
    return tuple(sum(rewards) / len(rewards) for rewards in of_each)


async def _nothing() -> None:
    """An evaluation's episodes hold no place in the buffer."""
