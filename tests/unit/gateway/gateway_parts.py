"""Episodes whose agent is a coroutine of a test that talks to the real gateway by HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import openai

from agentrl.envs.inline import InlineHost
from agentrl.gateway.starting import LazyGateway
from agentrl.protocols import Engine, ScaffoldContext
from agentrl.rollouts.episode_log import EpisodeJournal
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.scorers.verifier import Verifier
from agentrl.testing.builders import build_ticket
from agentrl.testing.environments import FaultyOptions, faulty
from agentrl.testing.recording_journal import RecordingJournal
from agentrl.testing.scripted import ScriptedEngine
from agentrl.tokens.chat import ChatFormat
from agentrl.types.episode import Episode, Ticket
from agentrl.types.generation import Sampling
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.program import GatewayAccess
from agentrl.types.task import Limits

LIMITS = Limits(max_turns=8, max_context_tokens=65536, max_reply_tokens=512, tool_s=30.0, total_s=120.0)
CALL = Message(Role.ASSISTANT, "I look.", (ToolCall("", "query", {"sql": "select count from name"}),))
ANSWER = Message(Role.ASSISTANT, "the count is 93")
QUESTION = "what is the count?"
TOOL = {"type": "function", "function": {"name": "query", "description": "Query.", "parameters": {"type": "object"}}}
ASKED = {"model": "agent", "messages": [{"role": "user", "content": QUESTION}]}
Agent = Callable[[GatewayAccess], Awaitable[Any]]


class Calling:
    """A scaffold that lets a coroutine call the gateway, and then answers the environment."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def run(self, context: ScaffoldContext) -> None:
        await context.start()
        async with context.gateway() as access:
            await self._agent(access)
            await context.step(ANSWER)


async def play(
    chat: ChatFormat,
    engine: Engine,
    agent: Agent,
    gateway: LazyGateway | None = None,
    agents: tuple[str, ...] = ("agent",),
    journal: EpisodeJournal | None = None,
    ticket: Ticket | None = None,
    **limits: Any,
) -> Episode:
    """One episode; a gateway of its own is closed behind it."""
    bounds = replace(LIMITS, **limits)
    served = gateway or LazyGateway()
    record = journal or RecordingJournal()
    players = {name: Player(f"policy-{name}", engine, chat, Sampling()) for name in agents}
    host = InlineHost(faulty, FaultyOptions(), bounds.tool_s)
    runner = EpisodeRunner(players, Calling(agent), host, Verifier(bounds.tool_s), record, bounds, served)

    async def nothing() -> None:
        return

    try:
        return await runner.run(runner.open(ticket or build_ticket()), nothing)
    finally:
        if gateway is None:
            await served.close()


def script(session: str, messages: Sequence[Message]) -> Message:
    """A call of the tool, and an answer to its result."""
    return CALL if messages[-1].role is not Role.TOOL else ANSWER


def client(access: GatewayAccess, **options: Any) -> openai.AsyncOpenAI:
    """The official client of OpenAI's dialects."""
    return openai.AsyncOpenAI(base_url=f"{access.url}/v1", api_key=access.key, max_retries=0, **options)


async def raw(access: GatewayAccess, path: str, body: object, headers: dict[str, str] | None = None) -> httpx.Response:
    """What the gateway answers to a request with the session's key."""
    async with httpx.AsyncClient(base_url=access.url, timeout=60) as http:
        return await http.post(path, json=body, headers={"authorization": f"Bearer {access.key}", **(headers or {})})


class Held(ScriptedEngine):
    """Gives no reply before it is told to."""

    def __init__(self, chat) -> None:
        super().__init__(chat, script)
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.num_asked = 0

    async def generate(self, request):
        self.asked.set()
        self.num_asked += 1
        await self.may_answer.wait()
        return await super().generate(request)
