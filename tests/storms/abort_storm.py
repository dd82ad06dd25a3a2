"""A storm of aborts over one engine: sessions talk while weights change under them, then every token is accounted for.

Two weight sets are published in turn, set ``step % 2`` as version ``0.step``, each by pause, load and resume; now
and then everything in flight is aborted without a publication. What the engine delivered is recorded below the
router and compared with what the sessions committed above it, and every committed log-probability is recomputed by
a plain Hugging Face forward pass under the weights that its span names.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

from agentrl.inference.client import EngineClient
from agentrl.inference.fleet import Fleet
from agentrl.inference.router import EngineRouter
from agentrl.rollouts.episode_log import NoLog
from agentrl.rollouts.record import EpisodeRecord
from agentrl.rollouts.replies import ContextFullError, session_key
from agentrl.rollouts.session import Session
from agentrl.testing.builders import build_ticket
from agentrl.testing.tiny import tiny_chat
from agentrl.types.episode import Agent, Episode
from agentrl.types.generation import Sampling
from agentrl.types.message import Message, Role
from agentrl.types.task import Limits
from agentrl.types.trajectory import build_trajectories
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import FolderWeights
from agentrl.weights.drain import drain
from tests.storms.abort_layers import ClockedEngine, EngineLayer, ForgetfulEngine, RecordingEngine
from tests.storms.token_verdict import count_common, find_max_gap

QUESTION = Message(Role.USER, "what is the count?")
FURTHER = Message(Role.USER, "and the schema?")
ABORT_SHARE = 0.25
LIMITS = Limits(max_turns=1 << 20, max_context_tokens=600, max_reply_tokens=160, tool_s=1.0, total_s=600.0)


@dataclass(frozen=True)
class StormPlan:
    """How hard it blows: `models` are the weights of even and odd steps, the engine starting with the even ones.

    With `max_drain_s` the engine is let finish before each pause: every other time, by chance, for a random part of
    that, else until it has.
    """

    models: tuple[Path, Path]
    num_aborts: int
    num_sessions: int = 12
    max_calm_s: float = 0.1
    max_drain_s: float = 0.0
    limits: Limits = LIMITS
    deadline_s: float = 600.0
    seed: int = 0


@dataclass(frozen=True)
class StormReport:
    """What a storm left: tokens that were delivered and not committed, committed and not delivered, and the largest
    difference in nats between a committed log-probability and its recomputation.
    """

    aborts: int
    aborts_with_tokens: int
    publishes: int
    drained: int
    cut: int
    episodes: int
    sampled_tokens: int
    tokens_lost: int
    tokens_twice: int
    max_gap: float


class Storm:
    """One storm; `is_forgetful` and `is_clocked` switch a protection off."""

    def __init__(self, client: EngineClient, plan: StormPlan, is_forgetful: bool = False, is_clocked: bool = False):
        self._client, self._plan = client, plan
        self._chat = tiny_chat(plan.models[0])
        self._random = random.Random(plan.seed)
        self._recorder = RecordingEngine(client)
        self._loaded = PolicyVersion(0, 0)
        self._is_over = False
        self._episodes: list[Episode] = []
        layer: EngineLayer = self._recorder
        layer = ForgetfulEngine(layer) if is_forgetful else layer
        layer = ClockedEngine(layer, lambda: self._loaded) if is_clocked else layer
        self._fleet = Fleet([layer], self._loaded)
        self._router = EngineRouter(self._fleet, plan.deadline_s)
        self._drained = self._cut = 0

    async def run(self) -> StormReport:
        """Waits for: the aborts of the plan, then the end of the replies in flight. Unblocked by: `deadline_s`."""
        await self._publish(self._loaded)
        async with asyncio.timeout(self._plan.deadline_s), asyncio.TaskGroup() as group:
            group.create_task(self._blow())
            for number in range(self._plan.num_sessions):
                group.create_task(self._talk(number))
        return self._judge()

    async def _blow(self) -> None:
        while self._recorder.aborts < self._plan.num_aborts:
            await asyncio.sleep(self._random.uniform(0, self._plan.max_calm_s))
            if self._random.random() < ABORT_SHARE:
                await self._client.abort_all()
            else:
                await self._publish(self._loaded.next())
        self._is_over = True

    async def _publish(self, version: PolicyVersion) -> None:
        if not self._plan.max_drain_s:
            return await self._swap(version)
        member = self._fleet.members[self._client.name]
        with self._fleet.held(member.name):
            short_s = self._random.uniform(0, self._plan.max_drain_s)
            drained = await drain(member, self._random.choice((short_s, self._plan.deadline_s)))
            self._drained, self._cut = self._drained + drained.finished, self._cut + drained.cut
            return await self._swap(version)

    async def _swap(self, version: PolicyVersion) -> None:
        await self._client.pause()
        self._fleet.begin_proof(self._client.name, version)
        await self._client.swap(FolderWeights(str(self._plan.models[version.step % 2])), version)
        await self._client.resume()
        self._fleet.proven(self._client.name)
        self._loaded = version

    async def _talk(self, number: int) -> None:
        """Play one episode after the other, each until its context is full."""
        played = 0
        while not self._is_over:
            record = EpisodeRecord(build_ticket(f"storm-{number}-{played}"), (Agent("agent", "main"),))
            limits = self._plan.limits
            session = Session(record, "agent", self._chat, self._router, Sampling(), limits, NoLog())
            message = QUESTION
            try:
                while not self._is_over:
                    await session.generate([message])
                    message = FURTHER
            except ContextFullError:
                pass
            self._router.end_session(session_key(record.ticket, "agent"))
            self._episodes.append(record.close(0.0))
            played += 1

    def _judge(self) -> StormReport:
        lost = twice = 0
        for episode in self._episodes:
            delivered = self._recorder.delivered[session_key(episode.ticket, "agent")].values()
            committed = [node.token_ids.tolist() for node in episode.nodes if node.sample is not None]
            for given, kept in zip(delivered, committed, strict=True):
                common = count_common(given, kept)
                lost += len(given) - common
                twice += len(kept) - common
        trajectories = [t for episode in self._episodes for t in build_trajectories(episode)]
        return StormReport(
            aborts=self._recorder.aborts,
            aborts_with_tokens=self._recorder.aborts_with_tokens,
            publishes=self._loaded.step,
            drained=self._drained,
            cut=self._cut,
            episodes=len(self._episodes),
            sampled_tokens=sum(episode.num_sampled_tokens for episode in self._episodes),
            tokens_lost=lost,
            tokens_twice=twice,
            max_gap=find_max_gap(trajectories, self._plan.models),
        )
