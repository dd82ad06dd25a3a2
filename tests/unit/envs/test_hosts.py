from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.definition import load_environment
from agentrl.envs.hosting import build_host
from agentrl.envs.inline import InlineHost
from agentrl.envs.process import ProcessHost, WarmWorkers
from agentrl.envs.starting import WorkerCommand
from agentrl.orchestration.transcripts import Teacher
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.scorers.verifier import Verifier
from agentrl.testing.builders import build_ticket
from agentrl.testing.environments import FaultyOptions, faulty
from agentrl.testing.processes import is_running
from agentrl.testing.recording_journal import RecordingJournal
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.tiny import tiny_chat
from agentrl.types.errors import ConfigError, EpisodeError
from agentrl.types.generation import Sampling
from agentrl.types.message import Message, Role
from agentrl.types.task import Limits, Split, Task
from agentrl_scaffolds.tool_calling import ToolCalling

NAME = "agentrl.testing.environments:faulty"
TASK = Task("faulty", Split.TRAIN, 0)
ANSWER = Message(Role.ASSISTANT, "done")
LIMITS = Limits(8, 4096, 512, 30.0, 60.0)


def host(tmp_path: Path, call_s: float = 30.0, **options) -> ProcessHost:
    return ProcessHost(WorkerCommand(NAME, options, tmp_path), faulty.describe(FaultyOptions(**options)), call_s)


async def play(where) -> float | None:
    async with where.open(TASK) as environment:
        await environment.start()
        await environment.step(ANSWER)
        return (await environment.score()).reward


async def ends(pid: int) -> bool:
    """Whether a process that was killed is gone; the system may need a moment for it."""
    for _ in range(1000):
        if not is_running(pid):
            return True
        await asyncio.sleep(0.01)
    return False


async def nothing() -> None:
    return


def pid_of(where: ProcessHost) -> int:
    [worker] = where._all
    return worker.pid


async def test_inline_and_process_give_the_same_episodes(tiny_model, tmp_path):
    definition = load_environment("sql")
    options = definition.parse_options({})
    chat = tiny_chat(tiny_model)
    apart = ProcessHost(WorkerCommand("sql", {}, tmp_path), definition.describe(options), 30.0)
    records = []
    for where in (InlineHost(definition, options, 5.0), apart):
        teacher = Teacher(definition, options, where, ToolCalling(), LIMITS)
        episodes = await teacher.play("clumsy", chat, range(6), seed=0)
        records.append(
            [(e.reward, e.metrics, e.stop_reason, [n.token_ids.tolist() for n in e.nodes]) for e in episodes]
        )
    await apart.close()
    assert records[0] == records[1]
    assert {reward for reward, *_ in records[0]} == {0.0, 1.0}


async def test_a_worker_is_used_again_for_the_next_episode(tmp_path):
    where = host(tmp_path)
    assert await play(where) == 1.0
    first = pid_of(where)
    assert await play(where) == 1.0
    assert pid_of(where) == first
    await where.close()
    assert not is_running(first)
    await where.close()


async def test_a_call_that_blocks_ends_by_its_deadline_while_the_loop_goes_on(tmp_path):
    """The child of a blocked worker is killed with it, and the next episode has a worker again."""
    pid_file = tmp_path / "pid"
    where = host(tmp_path, call_s=30.0, fault="spawn", at="step", pid_file=str(pid_file))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    ticking = asyncio.create_task(tick())
    async with where.open(TASK) as environment:
        await environment.start()
        worker = pid_of(where)
        environment._call_s = 2.0
        with pytest.raises(EpisodeError, match=r"timeout\(environment\.step\): not done within 2 s; worker killed"):
            await environment.step(ANSWER)
        async with asyncio.timeout(60):  # a worker that stood still before that still does it
            while not (pid_file.exists() and pid_file.read_text()):
                await asyncio.sleep(0.01)
        assert is_running(int(pid_file.read_text()))
    ticking.cancel()
    assert ticks > 10
    assert not is_running(worker)
    assert await ends(int(pid_file.read_text()))
    async with where.open(TASK) as environment:
        assert (await environment.start()).messages[0].content == "count"
        assert pid_of(where) != worker
    await where.close()


@pytest.mark.parametrize(("fault", "how"), [("crash", "exit code 3"), ("kill", "signal 9")])
async def test_a_worker_that_dies_is_a_failed_episode_and_not_a_failed_run(tmp_path, fault, how):
    where = host(tmp_path, fault=fault, at="score")
    with pytest.raises(EpisodeError, match=rf"environment\(crashed\): process environment-0 ended \({how}\)"):
        await play(where)
    assert where._all == set()
    await where.close()


async def test_a_worker_that_was_killed_between_episodes_costs_no_episode(tmp_path):
    where = host(tmp_path)
    assert await play(where) == 1.0
    [worker] = where._all
    os.kill(worker.pid, signal.SIGKILL)
    await worker._process.wait()
    assert await play(where) == 1.0
    assert pid_of(where) != worker.pid
    await where.close()


@pytest.mark.parametrize(
    ("fault", "at", "failure"),
    [
        ("raise", "create", "environment(create): RuntimeError: the database is gone"),
        ("raise", "step", "environment(step): RuntimeError: the database is gone"),
        ("answer", "start", "environment(answer): start() returned str, not an Opening"),
        ("nan", "score", "environment(reward): reward is nan, not a finite number"),
        ("text", "score", "environment(reward): reward is '1', not a finite number"),
    ],
)
async def test_a_failure_reads_the_same_in_process_and_in_a_worker(tiny_model, tmp_path, fault, at, failure):
    chat = tiny_chat(tiny_model)
    player = Player("main", ScriptedEngine(chat, lambda _session, _messages: ANSWER), chat, Sampling())
    apart = host(tmp_path, fault=fault, at=at)
    failures = []
    for where in (InlineHost(faulty, FaultyOptions(fault=fault, at=at), 5.0), apart):
        runner = EpisodeRunner({"agent": player}, ToolCalling(), where, Verifier(30.0), RecordingJournal(), LIMITS)
        episode = await runner.run(runner.open(build_ticket()), nothing)
        failures.append(str(episode.failure))
    await apart.close()
    assert failures == [failure, failure]


async def test_an_environment_that_cannot_be_closed_costs_its_worker_and_not_the_episode(tmp_path):
    where = host(tmp_path, fault="raise", at="close")
    assert await play(where) == 1.0
    assert (where._all, where._idle) == (set(), [])
    await where.close()


async def test_of_all_environments_no_more_workers_wait_than_there_is_room_for(tmp_path):
    warm = WarmWorkers(2)
    command, description = WorkerCommand(NAME, {}, tmp_path), faulty.describe(FaultyOptions())
    hosts = [ProcessHost(command, description, 30.0, warm=warm) for _ in range(3)]
    for where in hosts:
        assert await play(where) == 1.0
    assert [len(where._all) for where in hosts] == [0, 1, 1]
    first = pid_of(hosts[1])
    async with hosts[1].open(TASK) as environment:  # one that plays does not wait, and is not ended
        assert await play(hosts[0]) == 1.0
        assert [len(where._all) for where in hosts] == [1, 1, 1]
        await environment.start()
    assert pid_of(hosts[1]) == first
    assert [len(where._all) for where in hosts] == [1, 1, 0]
    for where in hosts:
        await where.close()


async def test_an_episode_that_is_cut_off_takes_its_worker_along(tmp_path):
    where = host(tmp_path, fault="block", at="step")
    opened = asyncio.Event()

    async def hang() -> None:
        async with where.open(TASK) as environment:
            opened.set()
            await environment.step(ANSWER)

    task = asyncio.create_task(hang())
    await opened.wait()
    worker = pid_of(where)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_running(worker)
    assert where._all == set()


async def test_an_environment_lives_in_processes_unless_the_recipe_says_otherwise(tmp_path, caplog):
    apart = await build_host(EnvironmentConfig(name="sql"), 5.0, tmp_path)
    assert isinstance(apart, ProcessHost)
    await apart.close()
    inline = await build_host(EnvironmentConfig(name="sql", placement="inline"), 5.0, tmp_path)
    assert isinstance(inline, InlineHost)
    assert (inline.description, caplog.text) == (apart.description, "")
    assert isinstance(await build_host(EnvironmentConfig(name=NAME, placement="inline"), 5.0, tmp_path), InlineHost)
    assert "nothing says that its calls are short" in caplog.text


async def test_options_are_checked_by_the_environments_own_process(tmp_path):
    wrong = EnvironmentConfig(name=NAME, options={"fualt": "crash"})
    with pytest.raises(ConfigError, match=r"unknown key 'fualt'; did you mean 'fault'\?"):
        await build_host(wrong, 5.0, tmp_path)


async def test_tasks_are_sampled_once_more_if_a_worker_dies_over_them(tmp_path):
    where = host(tmp_path)
    first = await where.sample(Split.TRAIN, 7, [0, 1])
    [worker] = where._all
    os.kill(worker.pid, signal.SIGSTOP)
    sampling = asyncio.create_task(where.sample(Split.TRAIN, 7, [0, 1]))
    while not where._sampling.locked():
        await asyncio.sleep(0)
    os.kill(worker.pid, signal.SIGKILL)
    assert await sampling == first
    assert pid_of(where) != worker.pid
    await where.close()


def test_what_is_no_definition_is_refused_by_name():
    with pytest.raises(ConfigError, match="is a ModelMetaclass, not an EnvironmentDefinition"):
        load_environment("agentrl.testing.environments:FaultyOptions")
    with pytest.raises(ConfigError, match=r"no plugin 'sqll' in agentrl\.environments; did you mean 'sql'\?"):
        load_environment("sqll")
