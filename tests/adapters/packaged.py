"""Plays environments that are made of others' packages, where those are, and the packages by themselves."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.hosting import build_host
from agentrl.protocols import EnvironmentHost
from agentrl.types.environment import Score
from agentrl.types.message import Message, Role
from agentrl.types.task import Task
from tests.adapters.conftest import ROOT, packages_python

CALL_S = 300.0


@asynccontextmanager
async def hosted(name: str, folder: Path, **options: Any) -> AsyncIterator[EnvironmentHost]:
    """Instances of an environment in processes of the Python that has its package."""
    config = EnvironmentConfig(name=name, options=options, interpreter=packages_python())
    host = await build_host(config, CALL_S, folder)
    try:
        yield host
    finally:
        await host.close()


async def played(host: EnvironmentHost, task: Task, replies: Sequence[str]) -> tuple[list[str], bool, Score]:
    """What an instance says to replies, its opening first; whether it has ended; its score."""
    async with host.open(task) as environment:
        said = [(await environment.start()).messages[0].content]
        is_done = False
        for reply in replies:
            assert not is_done
            result = await environment.step(Message(Role.ASSISTANT, reply))
            said += [message.content for message in result.messages]
            is_done = result.is_done
        return said, is_done, await environment.score()


def own_play(**asked: Any) -> list[Any]:
    """What a package does by itself, in a process without agentrl."""
    command = [str(packages_python()), str(ROOT / "tests/adapters/packages_side/own_play.py")]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, timeout=CALL_S, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def checked(target: str, *arguments: str) -> str:
    """What `agentrl env check` prints of an environment, run by the Python that has its package; it must pass.

    The fixture `beside_packages` lets that Python find agentrl.
    """
    command = [str(packages_python()), "-m", "agentrl.cli.main", "env", "check", target, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
