"""The code repair environment in real sandboxes."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
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
from agentrl_environments.code_repair.experts import CLUMSY_HABITS
from agentrl_environments.code_repair.tasks import FILE, CodeRepairOptions, problem_of

DEFINITION = load_environment("code_repair")
OPTIONS = CodeRepairOptions(source="one_line", call_s=30.0, total_s=120.0)
TASK = DEFINITION.sample(OPTIONS, Split.TRAIN, 0, [0])[0]
PROBLEM = problem_of(OPTIONS, TASK)
DONE = say("done")


@asynccontextmanager
async def hosted(options: CodeRepairOptions = OPTIONS) -> AsyncIterator[InlineHost]:
    """Instances in this process, sandboxes by bubblewrap."""
    async with running_keeper(SandboxConfig(kind="bwrap"), "test"):
        yield InlineHost(DEFINITION, options, 300.0)


def write(content: str, path: str = FILE) -> Message:
    return call("write", path=path, content=content)


async def observe(host: InlineHost, *actions: Message) -> list[str]:
    episode = await replay(host, TASK, [*actions, DONE])
    assert episode.failure is None
    return [step.result.messages[0].content for step in episode.steps[:-1]]


async def test_an_agent_reads_the_module_and_what_is_wrong_with_it():
    async with hosted() as host:
        module, told, written, passed = await observe(
            host, call("read", path=FILE), call("run_tests"), write(PROBLEM.solution), call("run_tests")
        )
    assert module == PROBLEM.module
    assert " of 3 tests passed\n" in told
    assert " gave " in told
    assert (written, passed) == ("written", "all 3 tests passed")


async def test_wrong_paths_and_odd_contents_are_observations():
    async with hosted() as host:
        missing, folder, refused, nowhere, deep = await observe(
            host,
            call("read", path="nowhere.py"),
            call("read", path="."),
            write("x", "/usr/x"),
            write("x", "a\0b"),
            write("x = 1\n", "a/b/c.py"),
        )
    assert missing.startswith("error: ")
    assert "nowhere.py" in missing
    assert folder.startswith("error: ")
    assert refused.startswith("error: ")
    assert nowhere == "error: a path has no zero byte"
    assert deep == "written"


async def test_what_is_left_in_place_of_the_file_is_judged_and_wrong():
    """Solutions run in the agent's sandbox by the visible tests, and may do there what they like."""
    left = {
        "a pipe": "import os; os.remove('solution.py'); os.mkfifo('solution.py')",
        "a link": "import os; os.rename('solution.py', '/tmp/kept'); os.symlink('/tmp/kept', 'solution.py')",
        "a folder": "import os; os.remove('solution.py'); os.mkdir('solution.py')",
        "nothing": "import os; os.remove('solution.py')",
        "a full workspace": "open('zeros', 'wb').write(bytes(3_000_000))",
        "no text": "open('solution.py', 'wb').write(bytes(range(256)))",
    }
    async with hosted() as host:
        for what, program in left.items():
            episode = await replay(host, TASK, [write(f"{program}\n{PROBLEM.solution}"), call("run_tests"), DONE])
            assert (episode.failure, episode.reward) == (None, 0.0), what


async def test_nothing_of_the_agents_sandbox_comes_along_but_the_file():
    """A solution that is right as long as a file lies beside it."""
    helper = [
        write(PROBLEM.solution, "helper.py"),
        write("import sys; sys.path.insert(0, '.')\nfrom helper import *\n"),
    ]
    async with hosted() as host:
        episode = await replay(host, TASK, [*helper, call("run_tests"), DONE])
    assert episode.steps[2].result.messages[0].content == "all 3 tests passed"
    assert episode.reward == 0.0


async def test_experts_are_as_right_as_they_say():
    """The clumsy one is right when its habit, drawn first from the seed, is the clean one, and never otherwise."""
    for source in ("one_line", "functions", "human_eval"):
        options = OPTIONS.model_copy(update={"source": source})
        tasks = DEFINITION.sample(options, Split.HELDOUT, 0, range(3))
        async with hosted(options) as host:

            async def earned(
                name: str, seed: int, task: Task, options: CodeRepairOptions = options, host: InlineHost = host
            ) -> float | None:
                return (await play(host, task, ExpertPlayer(DEFINITION, options, name, task, seed), 6)).reward

            assert [await earned("expert", 0, task) for task in tasks] == [1.0] * len(tasks)
            assert await earned("idle", 0, tasks[0]) == 0.0
            for seed in range(4):
                habit = random.Random(seed).choices(list(CLUMSY_HABITS), list(CLUMSY_HABITS.values()))[0]
                assert await earned("clumsy", seed, tasks[0]) == float(habit == "clean")


@pytest.mark.long
async def test_every_canonical_solution_of_human_eval_passes_and_its_stub_does_not():
    options = OPTIONS.model_copy(update={"source": "human_eval"})
    size = DEFINITION.describe(options).num_tasks
    assert size is not None
    tasks = DEFINITION.sample(options, Split.TRAIN, 0, range(size))
    tasks += DEFINITION.sample(options, Split.HELDOUT, 0, range(164 - size))
    wrong = []
    async with hosted(options) as host:
        for task in tasks:
            right = await replay(host, task, [write(problem_of(options, task).solution), DONE])
            stub = await replay(host, task, [DONE])
            if (right.reward, stub.reward) != (1.0, 0.0):
                wrong.append(task.payload["task_id"])
    assert wrong == []


@pytest.mark.long
async def test_it_keeps_what_it_promises_of_tasks_isolation_and_sessions():
    options = {"source": "one_line", "call_s": 30.0, "total_s": 120.0}
    async with opened("code_repair", options, num_tasks=4, max_turns=4, call_s=300.0) as subject:
        findings = [await check(subject, name) for name in ("tasks", "floor and ceiling", "isolation", "sessions")]
    assert [finding.verdict for finding in findings] == [Verdict.OK] * 4, findings
