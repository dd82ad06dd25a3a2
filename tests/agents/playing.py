"""Plays agents by the scaffold `program` against the recorder, without the rest of an episode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.protocols import Sandbox
from agentrl.sandbox.archives import files_of
from agentrl.sandbox.client import KeeperHost
from agentrl.types.environment import Opening
from agentrl.types.message import Message, Role
from agentrl.types.program import GatewayAccess
from agentrl.types.sandbox import WORKSPACE, Command, CommandResult, SandboxSpec
from tests.agents.cases import AgentCase
from tests.agents.policies import task
from tests.agents.recorder import Recorded, Recorder

KEY = "key-of-this-episode"
# By these agents tell which of their sub-agents asks.
AGENT_HEADERS = ("x-claude-code-agent-id", "thread-id")


@dataclass
class RecorderContext:
    """What the scaffold `program` needs of an episode: a task, a sandbox, and whom to ask."""

    sandbox: Sandbox
    socket: Path
    prompt: str
    agents: tuple[str, ...] = ("main",)
    results: list[CommandResult] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    async def start(self) -> Opening:
        return Opening((Message(Role.USER, self.prompt),))

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[GatewayAccess]:
        yield GatewayAccess("http://127.0.0.1:1", KEY, str(self.socket))

    async def run(self, command: Command) -> CommandResult:
        self.results.append(await self.sandbox.run(replace(command, gateway=str(self.socket)), "program"))
        return self.results[0]

    async def step(self, action: Message) -> None:
        self.answers.append(action.content)


@dataclass(frozen=True)
class Played:
    """What came of it: how the agent ended, what it printed, its workspace."""

    result: CommandResult
    answer: str
    files: dict[str, bytes]


async def play(host: KeeperHost, socket: Path, case: AgentCase, files: Sequence[tuple[str, str]]) -> Played:
    """An agent's whole run."""
    sandbox = await host.open(SandboxSpec())
    try:
        context = RecorderContext(sandbox, socket, task(files))
        await case.program().run(context)  # type: ignore[arg-type]
        return Played(context.results[0], context.answers[0], await files_of(sandbox, WORKSPACE, 1 << 20))
    finally:
        await sandbox.close()


def conversations(recorder: Recorder) -> dict[str, list[tuple[Recorded, Message]]]:
    """Calls with their replies, by the agent that its program says is asking."""
    found = defaultdict(list)
    for call, reply in recorder.replies:
        found[next((call.headers[name] for name in AGENT_HEADERS if name in call.headers), "main")].append(
            (call, reply)
        )
    return dict(found)
