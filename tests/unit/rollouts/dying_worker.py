"""Plays an episode of a lasting environment with a worker that dies at a chosen entry of its journal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rollout_parts import ANSWER, CALL, LIMITS, in_turn, nothing

from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.definition import EnvironmentDefinition
from agentrl.envs.hosting import build_host
from agentrl.envs.inline import InlineHost
from agentrl.journal.entries import EpisodeEntry, unpack
from agentrl.journal.history import EpisodeHistory, build_history
from agentrl.protocols import EnvironmentHost
from agentrl.rollouts.episode_log import EpisodeParked
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.scorers.verifier import Verifier
from agentrl.testing.builders import build_ticket
from agentrl.testing.durable_environments import LastingOptions, SessionServer
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.sole_holder import SoleHolder
from agentrl.types.episode import Episode
from agentrl.types.generation import Generation, GenerationRequest, Sampling
from agentrl_scaffolds.tool_calling import ToolCalling

NAME = build_ticket().episode_id
NUM_ENTRIES = 13  # lease, opening, three times reply, intent, result, then score and end
NUM_LIVING = NUM_ENTRIES + 1  # a live session is to judge, which is on record before its score


class WorkerDied(BaseException):
    """The worker is gone: nothing that it would have done afterwards happens."""


@dataclass
class DyingWriter:
    """A journal's writer in memory whose worker dies behind its last entry, or only as it writes the one after."""

    num_entries: int | None = None
    is_at_once: bool = True
    on_death: Callable[[], None] = lambda: None
    entries: list[EpisodeEntry] = field(default_factory=list)

    async def append(self, schema: int, kind: int, payload: bytes) -> None:
        self.note(schema, kind, payload)

    def note(self, schema: int, kind: int, payload: bytes) -> None:
        if len(self.entries) == self.num_entries:
            self._die()
        self.entries.append(unpack(schema, kind, payload))
        if len(self.entries) == self.num_entries and self.is_at_once:
            self._die()

    def _die(self) -> None:
        self.on_death()
        raise WorkerDied


@dataclass
class Place:
    """Where the workers of a test live: their server's folder and the environment that they play."""

    folder: Path
    definition: EnvironmentDefinition
    is_apart: bool = False

    @property
    def server(self) -> SessionServer:
        return SessionServer(self.folder)

    @asynccontextmanager
    async def host(self):
        """A host of environments, in this process or in others."""
        if not self.is_apart:
            yield InlineHost(self.definition, LastingOptions(folder=self.folder), 5.0)
            return
        name = f"agentrl.testing.durable_environments:{self.definition.name}"
        apart = await build_host(EnvironmentConfig(name=name, options={"folder": str(self.folder)}), 30.0, self.folder)
        try:
            yield apart
        finally:
            await apart.close()

    async def play(
        self, chat: Any, writer: DyingWriter, history: EpisodeHistory | None = None, token: int = 1
    ) -> Episode:
        """One worker's part of the episode, in a host of its own."""
        async with self.host() as host:
            runner = self.runner(chat, host, SoleHolder(writer, token, {NAME: history} if history else None))
            return await runner.run(runner.open(build_ticket()), nothing)

    def runner(self, chat: Any, host: EnvironmentHost, journal: Any, engine: Any = None) -> EpisodeRunner:
        """Two calls, then an answer."""
        engine = engine or ScriptedEngine(chat, in_turn(CALL, CALL, ANSWER))
        limits = replace(LIMITS, tool_s=30.0)
        return EpisodeRunner(
            {"agent": Player("main", engine, chat, Sampling())}, ToolCalling(), host, Verifier(30.0), journal, limits
        )

    async def cut(self, chat: Any, num_entries: int, is_at_once: bool) -> EpisodeHistory:
        """What is on record of a worker that died."""
        writer = DyingWriter(num_entries, is_at_once, self.server.disconnect)
        try:
            await self.play(chat, writer)
        except WorkerDied:
            self.server.connect()
        history = build_history(writer.entries)
        assert history is not None
        return history


class Parks(ScriptedEngine):
    """Tells the worker to stop as it gives the second reply."""

    journal: SoleHolder

    async def generate(self, request: GenerationRequest) -> Generation:
        if len(request.conversation) > 1:
            self.journal.park()
        return await super().generate(request)


async def park(
    chat: Any, place: Place, writer: DyingWriter, history: EpisodeHistory | None = None, token: int = 1
) -> None:
    """Play until the second reply, or go on to it, and park there."""
    engine = Parks(chat, in_turn(CALL, CALL, ANSWER))
    engine.journal = SoleHolder(writer, token, {NAME: history} if history else None)
    async with place.host() as host:
        runner = place.runner(chat, host, engine.journal, engine)
        with pytest.raises(EpisodeParked):
            await runner.run(runner.open(build_ticket()), nothing)


def results_of(episode: Episode) -> list[str | None]:
    """What the calls of an episode returned."""
    return [effect.result for turn in episode.turns for effect in turn.effects]
