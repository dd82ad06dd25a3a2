"""An agent's whole episode of the environment of `writing`, by a gateway and an engine of the caller's."""

from __future__ import annotations

from dataclasses import replace

from agentrl.envs.inline import InlineHost
from agentrl.gateway.starting import LazyGateway
from agentrl.rollouts.recorded_replies import Generating
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.scorers.verifier import Verifier
from agentrl.testing.builders import build_ticket
from agentrl.testing.recording_journal import RecordingJournal
from agentrl.tokens.chat import ChatFormat
from agentrl.types.episode import Episode
from agentrl.types.generation import Sampling
from agentrl.types.task import Limits, Split, Task
from tests.agents.cases import AgentCase
from tests.agents.writing import WritingOptions, definition

LIMITS = Limits(max_turns=64, max_context_tokens=131_072, max_reply_tokens=2048, tool_s=120.0, total_s=700.0)


async def play_episode(
    case: AgentCase,
    engine: Generating,
    chat: ChatFormat,
    files: list[tuple[str, str]],
    gateway: LazyGateway,
    name: str = "train-000000-0",
) -> Episode:
    runner = EpisodeRunner(
        {"main": Player("main", engine, chat, Sampling())},
        case.program(),
        InlineHost(definition, WritingOptions(), LIMITS.tool_s),
        Verifier(LIMITS.tool_s),
        RecordingJournal(),
        LIMITS,
        gateway,
    )

    async def nothing() -> None:
        return

    task = Task("writing", Split.TRAIN, 0, {"files": files})
    return await runner.run(runner.open(replace(build_ticket(name), task=task)), nothing)
