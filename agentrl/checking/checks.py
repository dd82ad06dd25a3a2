"""All checks of an environment, one after the other, each with a deadline."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from agentrl.checking.behaviour import (
    check_floor_and_ceiling,
    check_isolation,
    check_latency,
    check_rewards,
    check_tasks,
    check_tools,
)
from agentrl.checking.leftovers import check_death, check_leaks
from agentrl.checking.recovery import check_determinism, check_sessions, check_snapshots
from agentrl.checking.subject import Finding, Subject, Verdict
from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.definition import load_environment
from agentrl.envs.hosting import build_host
from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.starting import sandboxes
from agentrl.types.errors import ConfigError, EpisodeError
from agentrl.types.task import Split

CHECKS: Mapping[str, Callable[[Subject], Awaitable[Finding]]] = {
    "tasks": check_tasks,
    "tools": check_tools,
    "rewards": check_rewards,
    "floor and ceiling": check_floor_and_ceiling,
    "determinism": check_determinism,
    "isolation": check_isolation,
    "snapshots": check_snapshots,
    "sessions": check_sessions,
    "leaks": check_leaks,
    "death": check_death,
    "latency": check_latency,
}
CALL_S = 30.0
CHECK_S = 300.0
_SEED = 0


@asynccontextmanager
async def opened(
    name: str,
    options: Mapping[str, Any],
    num_tasks: int,
    max_turns: int,
    call_s: float = CALL_S,
    sandbox: SandboxConfig | None = None,
) -> AsyncIterator[Subject]:
    """The environment, in worker processes, as one to be played or checked. Raises ConfigError or EpisodeError."""
    definition = load_environment(name)
    async with AsyncExitStack() as ending:
        folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-check-"))
        keeper = await ending.enter_async_context(sandboxes(sandbox or SandboxConfig(), "check"))
        host = await build_host(EnvironmentConfig(name=name, options=dict(options)), call_s, Path(folder))
        try:
            if host.description.has_program:
                raise ConfigError(
                    f"'{name}' brings the program that plays it, and there is nothing to be played by messages; try it "
                    'with `agentrl eval` and scaffold.name = "own_program"'
                )
            await keeper.start_for([host.description])
            size = host.description.num_tasks
            counts = {Split.TRAIN: min(num_tasks, size or num_tasks), Split.HELDOUT: max(num_tasks // 4, 1)}
            tasks = [task for split in Split for task in await host.sample(split, _SEED, range(counts[split]))]
            yield Subject(name, definition, definition.parse_options(options), host, tasks, max_turns, Path(folder))
        finally:
            await host.close()


async def check(subject: Subject, name: str) -> Finding:
    """What one of `CHECKS` finds; one that does not end, or that the environment keeps from being made, has failed.

    Waits for: the check. Unblocked by: its end, or five minutes.
    """
    try:
        async with asyncio.timeout(CHECK_S):
            return await CHECKS[name](subject)
    except EpisodeError as error:
        return Finding(name, Verdict.FAILED, str(error), "see file and line")
    except TimeoutError:
        remedy = "make steps quicker, or check fewer tasks"
        return Finding(name, Verdict.FAILED, f"not done within {CHECK_S:g} s", remedy)
