"""What an episode needs in tests of sessions and runners: a chat format, limits, a way to play."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.envs.inline import InlineHost
from agentrl.protocols import Engine
from agentrl.rollouts.episode_log import NoLog
from agentrl.rollouts.record import EpisodeRecord
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.rollouts.session import Session
from agentrl.scorers.verifier import Verifier
from agentrl.testing.builders import build_ticket
from agentrl.testing.environments import FaultyOptions, faulty
from agentrl.testing.recording_journal import RecordingJournal
from agentrl.tokens.chat import ChatFormat
from agentrl.types.episode import Agent, Episode
from agentrl.types.generation import Sampling
from agentrl.types.message import Message, Role, ToolCall, ToolSpec
from agentrl.types.task import Limits
from agentrl_scaffolds.tool_calling import ToolCalling

TOOLS = (ToolSpec("query", "Query."),)
QUESTION = Message(Role.USER, "what is the count?")
RESULT = Message(Role.TOOL, "93", tool_call_id="call")
CALL = Message(Role.ASSISTANT, "", (ToolCall("", "query", {"sql": "select count from name"}),))
ANSWER = Message(Role.ASSISTANT, "the count is 93")
PLAIN_SAMPLING = Sampling()
LIMITS = Limits(max_turns=8, max_context_tokens=4096, max_reply_tokens=512, tool_s=5.0, total_s=60.0)


def in_turn(*replies: Message):
    """A script that gives these replies one after the other, the last one for ever."""

    def script(session: str, messages: Sequence[Message]) -> Message:
        return replies[min(sum(m.role is Role.ASSISTANT for m in messages), len(replies) - 1)]

    return script


def make_session(
    chat: ChatFormat, engine: Engine, limits: Limits = LIMITS, sampling: Sampling = PLAIN_SAMPLING
) -> tuple[EpisodeRecord, Session]:
    record = EpisodeRecord(build_ticket(), (Agent("agent", "main"),))
    return record, Session(record, "agent", chat, engine, sampling, limits, NoLog())


async def nothing() -> None:
    return


async def play(
    chat: ChatFormat,
    engine: Engine,
    scaffold: Any = None,
    limits: Limits = LIMITS,
    journal: Any = None,
    on_generated: Any = nothing,
    host: Any = None,
    **faults: Any,
) -> Episode:
    """One episode of the faulty environment, or of another host."""
    host = host or InlineHost(faulty, FaultyOptions(**faults), limits.tool_s)
    scaffold, journal = scaffold or ToolCalling(), journal or RecordingJournal()
    player = Player("main", engine, chat, Sampling())
    runner = EpisodeRunner({"agent": player}, scaffold, host, Verifier(limits.tool_s), journal, limits)
    return await runner.run(runner.open(build_ticket()), on_generated)
