"""Checks of what episodes leave behind in their process, and of what a process leaves behind that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from agentrl.checking.subject import Finding, Subject, Verdict
from agentrl.envs.process import ProcessEnvironment
from agentrl.envs.starting import start_worker
from agentrl.process.remote import ChildProcess
from agentrl.types.errors import EpisodeError
from agentrl.types.task import Task

_CALL_S = 60.0
_WARM = 2
_EPISODES = 8
_GONE_S = 10.0


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a process holds, counted by the kernel's own files."""

    files: int
    sockets: int
    threads: int
    children: int

    @classmethod
    def of(cls, pid: int) -> Holdings:
        """Of a process of this machine."""
        links = [_target(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        sockets = sum(link.startswith("socket:") for link in links)
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return cls(len(links) - sockets, sockets, len(tasks), len(descendants(pid)))

    def more_than(self, before: Holdings) -> list[str]:
        """What there is more of. Example: ``["8 children"]``."""
        grown = {name: getattr(self, name) - getattr(before, name) for name in self.__slots__}
        return [f"{count} {name}" for name, count in grown.items() if count > 0]


def descendants(pid: int) -> list[int]:
    """Processes that a process has started and those have, as far as they have not left it."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in file.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


async def check_leaks(subject: Subject) -> Finding:
    """Episodes that are closed leave no files, sockets, threads or processes in their worker."""
    worker = await start_worker(subject.command, 0)
    try:
        for task in subject.tasks[:_WARM]:
            await _play_a_bit(worker, subject, task)
        before = Holdings.of(worker.pid)
        for number in range(_EPISODES):
            await _play_a_bit(worker, subject, subject.tasks[number % len(subject.tasks)])
        grown = Holdings.of(worker.pid).more_than(before)
    except EpisodeError as error:
        return Finding("leaks", Verdict.FAILED, f"an episode could not be played: {error}", "see the other checks")
    finally:
        worker.kill()
    if grown:
        said = f"{', '.join(grown)} more after {_EPISODES} episodes"
        return Finding("leaks", Verdict.FAILED, said, "end in close() what create, start and step began")
    return Finding("leaks", Verdict.OK, f"{_EPISODES} episodes left no file, socket, thread or process")


async def check_death(subject: Subject) -> Finding:
    """A worker that is killed in mid-episode takes all that it started with it, and the next one plays."""
    task = subject.tasks[0]
    worker = await start_worker(subject.command, 1)
    try:
        environment = ProcessEnvironment(worker, _CALL_S)
        await environment.create(task, None)
        await environment.start()
        started = descendants(worker.pid)
        os.kill(worker.pid, signal.SIGKILL)
    except EpisodeError as error:
        return Finding("death", Verdict.FAILED, f"no episode began: {error}", "see the other checks")
    finally:
        worker.kill()
    if left := await _left(started):
        said = f"process {left[0]} lived on after its worker was killed"
        return Finding(
            "death", Verdict.FAILED, said, "start it in the worker's process group, or as one that dies with it"
        )
    successor = await start_worker(subject.command, 2)
    try:
        await _play_a_bit(successor, subject, task)
    except EpisodeError as error:
        remedy = "let nothing of an episode lie around that the next one finds, such as a lock"
        return Finding("death", Verdict.FAILED, f"after a worker's death the next one fails: {error}", remedy)
    finally:
        successor.kill()
    return Finding("death", Verdict.OK, f"killed in mid-episode with {len(started)} processes, nothing was left")


async def _play_a_bit(worker: ChildProcess, subject: Subject, task: Task) -> None:
    """A short episode by chance in a worker that stays. Raises EpisodeError."""
    environment = ProcessEnvironment(worker, _CALL_S)
    await environment.create(task, None)
    opening = await environment.start()
    player = subject.players["random"](task, task.ordinal)
    messages = list(opening.messages)
    for _ in range(min(subject.max_turns, 3)):
        action = await player.act(messages, opening.tools)
        result = await environment.step(action)
        if result.is_done:
            break
        messages += [action, *result.messages]
    await environment.score()
    await environment.close()


async def _left(pids: list[int]) -> list[int]:
    """Those that are still there after a while, zombies left out."""
    until = time.monotonic() + _GONE_S
    while (left := [pid for pid in pids if _lives(pid)]) and time.monotonic() < until:
        await asyncio.sleep(0.05)
    return left


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
