"""Plays shipped environments with a scaffold against policies that answer what they are told by the letter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.envs.definition import load_environment
from agentrl.envs.inline import InlineHost
from agentrl.journal.history import EpisodeHistory
from agentrl.journal.writer import JournalWriter
from agentrl.protocols import Scaffold
from agentrl.rollouts.episode_log import EpisodeJournal, NoJournal
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.scorers.verifier import Verifier
from agentrl.testing.builders import build_ticket
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.sole_holder import SoleHolder
from agentrl.tokens.chat import ChatFormat
from agentrl.types.episode import Episode
from agentrl.types.generation import Generation, GenerationRequest, Sampling
from agentrl.types.message import Message, Role
from agentrl.types.task import Limits, Split
from agentrl_environments.facts.tasks import FactsOptions
from agentrl_environments.facts.tasks import build_problem as build_facts
from agentrl_environments.facts.tasks import sample_task as sample_facts
from agentrl_environments.sql.database import Database
from agentrl_environments.sql.tasks import SqlOptions
from agentrl_environments.sql.tasks import build_problem as build_sql
from agentrl_environments.sql.tasks import sample_task as sample_sql

LIMITS = Limits(max_turns=9, max_context_tokens=8192, max_reply_tokens=2048, tool_s=60.0, total_s=300.0)
NAME = build_ticket().episode_id
SQL_TASK = sample_sql(SqlOptions(), Split.TRAIN, 3, 0)
SQL = build_sql(SqlOptions(), SQL_TASK.payload["seed"], Split.TRAIN)
SQL_ANSWER = str(Database(SQL, SqlOptions()).run(SQL.query)[0][0])
SQL_SCHEMA = f"{SQL.table}(name, {', '.join(SQL.columns)})"
FACTS_OPTIONS = FactsOptions(num_questions=3)
FACTS_TASK = sample_facts(FACTS_OPTIONS, Split.TRAIN, 3, 0)
FACTS = build_facts(FACTS_OPTIONS, FACTS_TASK.payload["seed"], Split.TRAIN)
FACTS_OPENING = f"{FACTS.facts} Answer with one word only. {FACTS.questions[0].text}"


def say(text: str) -> Message:
    return Message(Role.ASSISTANT, text)


class Policy(ScriptedEngine):
    """Replies to the last message of a conversation by its text; to one that it does not know it fails."""

    def __init__(self, chat: ChatFormat, replies: Mapping[str, Message]) -> None:
        super().__init__(chat, lambda session, messages: replies[messages[-1].content])
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        return await super().generate(request)

    def told(self, request: int) -> list[tuple[str, str]]:
        """Role and text of each message of the conversation that a request continues."""
        return [(str(message.role), message.content) for message in self.requests[request].conversation]


@dataclass(slots=True)
class Game:
    """An environment with one task, a scaffold, and what each agent replies to what."""

    environment: str
    scaffold: Scaffold
    replies: Mapping[str, Mapping[str, Message]]
    engines: dict[str, Policy] = field(default_factory=dict)

    async def play(self, chat: ChatFormat, journal: EpisodeJournal | None = None, limits: Limits = LIMITS) -> Episode:
        definition = load_environment(self.environment)
        options, task = {"sql": (SqlOptions(), SQL_TASK), "facts": (FACTS_OPTIONS, FACTS_TASK)}[self.environment]
        self.engines = {name: Policy(chat, replies) for name, replies in self.replies.items()}
        players = {name: Player(name, engine, chat, Sampling()) for name, engine in self.engines.items()}
        host, verifier = InlineHost(definition, options, limits.tool_s), Verifier(limits.tool_s)
        runner = EpisodeRunner(players, self.scaffold, host, verifier, journal or NoJournal(), limits)
        return await runner.run(runner.open(replace(build_ticket(), task=task)), _nothing)

    async def play_on(self, chat: ChatFormat, folder: Path, token: int, history: EpisodeHistory | None) -> Episode:
        """As `play`, by a worker with a journal that goes on from a history."""
        writer = JournalWriter(folder, "worker")
        try:
            return await self.play(chat, SoleHolder(writer, token, {NAME: history} if history is not None else {}))
        finally:
            await writer.close()

    @property
    def engine(self) -> Policy:
        """That of the first agent."""
        return next(iter(self.engines.values()))


def alone(environment: str, scaffold: Scaffold, replies: Mapping[str, Any]) -> Game:
    """A game of one agent; replies may be texts."""
    return Game(environment, scaffold, {"agent": {text: _message(reply) for text, reply in replies.items()}})


def calls_of(episode: Episode) -> list[tuple[str, str, dict[str, Any]]]:
    """Id, tool and arguments of every call that was carried out."""
    return [(e.effect_id, e.call.name, e.call.arguments) for turn in episode.turns for e in turn.effects]


def shape_of(episode: Episode) -> list[tuple[Any, ...]]:
    """All of an episode but seconds: its nodes with their tokens, its turns with their effects."""
    nodes: Sequence[Any] = [(n.index, n.parent, n.agent, n.turn, n.token_ids.tolist()) for n in episode.nodes]
    effects = [(e.effect_id, e.call, e.result) for turn in episode.turns for e in turn.effects]
    return [*nodes, *[(t.index, t.agent, t.reply_node) for t in episode.turns], *effects]


def _message(reply: str | Message) -> Message:
    return say(reply) if isinstance(reply, str) else reply


async def _nothing() -> None:
    return
