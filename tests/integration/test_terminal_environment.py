"""The terminal environment in real sandboxes."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from agentrl.checking.checks import check, opened
from agentrl.checking.players import ExpertPlayer
from agentrl.checking.playing import play, replay
from agentrl.checking.subject import Verdict
from agentrl.envs.authoring import call, say
from agentrl.envs.definition import load_environment
from agentrl.envs.inline import InlineHost
from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.starting import running_keeper
from agentrl.types.message import Message
from agentrl.types.task import Split, Task
from agentrl_environments.terminal.experts import CLUMSY_HABITS
from agentrl_environments.terminal.tasks import TASKS, TerminalOptions, build_problem

OPTIONS = TerminalOptions(kinds=("rename",), command_s=60.0)
TASK = TASKS.task("terminal", Split.TRAIN, 0, 0)
PROBLEM = build_problem(OPTIONS, TASK.payload["seed"], Split.TRAIN)
FILE, NEW = PROBLEM.slots.file, PROBLEM.slots.new
DONE = say("done")


@asynccontextmanager
async def hosted(options: TerminalOptions = OPTIONS) -> AsyncIterator[InlineHost]:
    """Instances in this process, sandboxes by bubblewrap."""
    async with running_keeper(SandboxConfig(kind="bwrap"), "test"):
        yield InlineHost(load_environment("terminal"), options, 60.0)


def shell(command: str) -> Message:
    return call("shell", command=command)


async def reward(host: InlineHost, *commands: str, task: Task = TASK) -> float | None:
    episode = await replay(host, task, [*map(shell, commands), DONE])
    assert episode.failure is None
    return episode.reward


async def observations(host: InlineHost, commands: Sequence[str]) -> list[str]:
    episode = await replay(host, TASK, [*map(shell, commands), DONE])
    return [step.result.messages[0].content for step in episode.steps[:-1]]


async def test_the_files_in_the_end_are_what_counts():
    async with hosted() as host:
        assert await reward(host, PROBLEM.command) == 1.0
        assert await reward(host, f"cat {FILE} > {NEW}", f"rm {FILE}") == 1.0
        assert await reward(host) == 0.0
        assert await reward(host, "ls") == 0.0
        assert await reward(host, PROBLEM.command, "echo more > another.txt") == 0.0
        assert await reward(host, PROBLEM.command, f"echo more >> {NEW}") == 0.0
        assert await reward(host, f"cp {FILE} {NEW}") == 0.0


async def test_what_an_agent_leaves_cannot_reach_the_verifier():
    """Each of these is judged, and wrong: a link in place of the file, programs of its own, a full workspace."""
    fake = "for p in sh diff cat tar mkdir; do printf '#!/bin/sh\\necho right\\n' > $p; chmod +x $p; done"
    async with hosted() as host:
        assert await reward(host, f"mv {FILE} /tmp/kept", f"ln -s /tmp/kept {NEW}") == 0.0
        assert await reward(host, f"rm {FILE}", f"ln -s ../expected/{NEW} {NEW}") == 0.0
        assert await reward(host, f"rm {FILE}", f"mkfifo {NEW}") == 0.0
        assert await reward(host, f"rm {FILE}", fake) == 0.0
        assert await reward(host, "rm *", "mkdir expected found", f"echo x | tee expected/{NEW} found/{NEW}") == 0.0
        assert await reward(host, PROBLEM.command, "head -c 3000000 /dev/zero > zeros") == 0.0
        assert await reward(host, "rm *") == 0.0


async def test_an_agent_reads_output_exit_code_and_what_was_cut():
    commands = ["ls", "true", "false", "no-such-program", "yes | head -c 1000", "echo err >&2; exit 3"]
    async with hosted() as host:
        ls, true, false, unknown, long, failing = await observations(host, commands)
    assert ls == FILE
    assert true == "(no output)"
    assert false == "(exit code 1)"
    assert "not found" in unknown
    assert unknown.endswith("(exit code 127)")
    assert long == "y\n" * 200 + "(the rest of the output was cut)"
    assert failing == "err\n(exit code 3)"


async def test_a_command_that_does_not_end_is_killed_and_its_episode_judged():
    async with hosted(TerminalOptions(kinds=("rename",), command_s=0.5)) as host:
        assert await observations(host, ["while :; do :; done"]) == ["(killed after 0.5 s)"]
        assert await reward(host, "yes") == 0.0


async def test_experts_are_as_right_as_they_say():
    """The clumsy one is right when its habit, drawn first from the seed, is the clean one, and never otherwise."""
    definition, options = load_environment("terminal"), TerminalOptions(command_s=60.0)
    tasks = [TASKS.task("terminal", split, ordinal, 0) for split in Split for ordinal in range(5)]
    async with hosted(options) as host:

        async def earned(name: str, seed: int, task: Task) -> float | None:
            return (await play(host, task, ExpertPlayer(definition, options, name, task, seed), 6)).reward

        assert [await earned("expert", 0, task) for task in tasks] == [1.0] * len(tasks)
        assert [await earned("random", seed, TASK) for seed in range(4)] == [0.0] * 4
        for seed in range(8):
            habit = random.Random(seed).choices(list(CLUMSY_HABITS), list(CLUMSY_HABITS.values()))[0]
            assert await earned("clumsy", seed, tasks[seed]) == float(habit == "clean")


@pytest.mark.long
async def test_it_keeps_what_it_promises_of_tasks_isolation_and_sessions():
    async with opened("terminal", {"command_s": 60.0}, num_tasks=4, max_turns=4, call_s=120.0) as subject:
        findings = [await check(subject, name) for name in ("tasks", "isolation", "sessions")]
    assert [finding.verdict for finding in findings] == [Verdict.OK] * 3, findings
