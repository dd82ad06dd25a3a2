"""The bash scaffold in the terminal environment, whose commands run in real sandboxes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.envs.definition import load_environment
from agentrl.envs.inline import InlineHost
from agentrl.rollouts.episode_log import NoJournal
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.starting import running_keeper
from agentrl.scorers.verifier import Verifier
from agentrl.testing.builders import build_ticket
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.tiny import tiny_chat
from agentrl.types.episode import Episode
from agentrl.types.generation import Sampling
from agentrl.types.message import Message, Role
from agentrl.types.task import Limits, Split
from agentrl_environments.terminal.tasks import TASKS, TerminalOptions, build_problem
from agentrl_scaffolds.bash import _ADVICE, Bash

OPTIONS = TerminalOptions(kinds=("rename",), command_s=60.0)
TASK = TASKS.task("terminal", Split.TRAIN, 0, 0)
PROBLEM = build_problem(OPTIONS, TASK.payload["seed"], Split.TRAIN)
LIMITS = Limits(max_turns=6, max_context_tokens=8192, max_reply_tokens=2048, tool_s=120.0, total_s=300.0)
LOOK, DO = "I look.\n```bash\ncat *\nls\n```", f"```bash\n{PROBLEM.command}\necho moved\n```"


async def play(tiny_model, *replies: str) -> tuple[Episode, list[Message]]:
    """An episode of these replies, and the conversation that the last of them ends."""
    seen: list[Message] = []

    def script(session: str, messages: list[Message]) -> Message:
        seen[:] = messages
        return Message(Role.ASSISTANT, replies[sum(message.role is Role.ASSISTANT for message in messages)])

    chat = tiny_chat(tiny_model)
    async with running_keeper(SandboxConfig(kind="bwrap"), "test"):
        host = InlineHost(load_environment("terminal"), OPTIONS, LIMITS.tool_s)
        player = Player("main", ScriptedEngine(chat, script), chat, Sampling())
        runner = EpisodeRunner({"agent": player}, Bash(), host, Verifier(LIMITS.tool_s), NoJournal(), LIMITS)

        async def nothing() -> None:
            return

        return await runner.run(runner.open(replace(build_ticket(), task=TASK)), nothing), seen


@pytest.mark.parametrize(("last", "reward"), [(DO, 1.0), ("I would not know how.", 0.0)])
async def test_commands_in_blocks_are_run_in_the_sandbox(last, reward, tiny_model):
    episode, seen = await play(tiny_model, LOOK, f"{LOOK}\n{LOOK}", last, "done")
    assert (episode.failure, episode.reward) == (None, reward)
    listing = "".join(PROBLEM.files.values()) + "\n".join(sorted(PROBLEM.files))
    told = [message.content for message in seen if message.role is Role.USER]
    assert told[:3] == [PROBLEM.prompt, f"Output:\n{listing}", _ADVICE]
    assert told[3:] == (["Output:\nmoved"] if reward else [])
