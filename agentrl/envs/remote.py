"""Environments on servers (`agentrl env serve`): their sessions outlive the process that plays the episode."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from agentrl.envs.abilities import no_sandbox
from agentrl.envs.connection import Address, ServerConnection
from agentrl.envs.servers import ServerPool
from agentrl.envs.wire import (
    Attach,
    Close,
    GiveScore,
    Open,
    Outcome,
    Sample,
    SessionRequest,
    Snapshot,
    Start,
    Step,
)
from agentrl.types.environment import EnvironmentDescription, Opening, Origin, Score, StepResult
from agentrl.types.errors import EpisodeError
from agentrl.types.message import Message
from agentrl.types.sandbox import Command, CommandResult
from agentrl.types.task import Split, Task

_CLOSE_S = 5.0
_PATH = "/sessions/"
_log = logging.getLogger(__name__)


class RemoteEnvironment:
    """A session on a server, held under a fencing token; each call has an id of its own, whoever makes it."""

    def __init__(self, connection: ServerConnection, session: str, token: int, call_s: float) -> None:
        self._connection, self._session = connection, session
        self._token, self._call_s = token, call_s
        self._caller, self._numbers = secrets.token_hex(8), itertools.count()
        self._is_detached = False

    async def attach(self) -> None:
        """Take the session over. Raises EpisodeError (kind lost) if it is gone."""
        await self._call(Attach)

    async def start(self) -> Opening:
        """The environment's opening."""
        opening: Opening = await self._call(Start)
        return opening

    async def step(self, action: Message) -> StepResult:
        """The environment's reaction."""
        result: StepResult = await self._call(Step, action=action)
        return result

    async def score(self) -> Score:
        """The environment's verdict."""
        score: Score = await self._call(GiveScore)
        return score

    async def handle(self) -> str:
        """Names the session and its server. Example: ``http://10.0.0.5:8100/sessions/0-4rQx5jXv0dJm3uQnHq2l9A``."""
        return f"{self._connection.address.url}{_PATH}{self._session}"

    async def detach(self) -> None:
        """Leave the session alive; the server ends it if nobody takes it over for a while."""
        self._is_detached = True

    async def outcome(self, step: int, effect_ids: Sequence[str]) -> StepResult | None:
        """The result of a step that was dispatched to the session."""
        result: StepResult | None = await self._call(Outcome, step=step, effect_ids=tuple(effect_ids))
        return result

    async def snapshot(self) -> bytes:
        """The whole state."""
        state: bytes = await self._call(Snapshot)
        return state

    async def run(self, command: Command, effect_id: str) -> CommandResult:
        """Refused: a server's sandboxes reach no gateway of this machine."""
        raise no_sandbox("this one is on a server")

    async def stop(self, effect_id: str) -> None:
        """Refused as `run` is."""
        raise no_sandbox("this one is on a server")

    async def close(self) -> None:
        """End the session unless it was left alive; the server ends one behind a call that is under way."""
        if not self._is_detached:
            self._is_detached = True
            call = Close(id=self._next_id(), session=self._session, token=self._token)
            await self._connection.call(call, _CLOSE_S, patience_s=0.0)

    async def _call(self, kind: type[SessionRequest], **arguments: Any) -> Any:
        call = kind(id=self._next_id(), session=self._session, token=self._token, **arguments)
        return await self._connection.call(call, self._call_s)

    def _next_id(self) -> str:
        return f"{self._caller}-{next(self._numbers)}"


class RemoteHost:
    """Sessions of one environment on one or more servers."""

    def __init__(self, name: str, description: EnvironmentDescription, pool: ServerPool, call_s: float) -> None:
        """`name` is what the servers call it, and `description` theirs: the sessions' handles are the servers' own."""
        self._name = name
        # Sandboxes are the servers' own as well.
        recovery = replace(description.recovery, has_handles=True)
        self.description = replace(description, recovery=recovery, needs_sandbox=False)
        self._pool, self._call_s = pool, call_s

    async def sample(self, split: Split, seed: int, ordinals: Sequence[int]) -> list[Task]:
        """Tasks of a split in a run's order, made by a server. Raises EpisodeError."""
        call = Sample(
            id=secrets.token_hex(8),
            environment=self._name,
            split=split,
            seed=seed,
            ordinals=tuple(ordinals),
        )
        return await self._pool.sample(call, self._call_s * max(1, len(ordinals)))

    @asynccontextmanager
    async def open(self, task: Task, origin: Origin | None = None) -> AsyncIterator[RemoteEnvironment]:
        """A session for one episode. Raises EpisodeError if it cannot be made."""
        origin = origin or Origin()
        if origin.handle is None:
            connection, session = await self._open_fresh(task, origin)
        else:
            url, _, session = origin.handle.partition(_PATH)
            connection = self._pool.connection(url)
        environment = RemoteEnvironment(connection, session, origin.token, self._call_s)
        try:
            if origin.handle is not None:
                await environment.attach()
            yield environment
        finally:
            await self._close(environment, connection)

    async def close(self) -> None:
        """Close the connections; safe to call twice."""
        self._pool.close()

    async def _open_fresh(self, task: Task, origin: Origin) -> tuple[ServerConnection, str]:
        call = Open(
            id=secrets.token_hex(8),
            environment=self._name,
            task=task,
            snapshot=origin.snapshot,
            token=origin.token,
        )
        return await self._pool.open_session(call, self._call_s)

    async def _close(self, environment: RemoteEnvironment, connection: ServerConnection) -> None:
        """End the session; the episode's outcome stands even if that fails, and the server ends it by itself."""
        try:
            await environment.close()
        except EpisodeError as error:
            if error.failure.kind not in ("lost", "fenced"):  # then there is none, or it is another's by now
                _log.warning("a session could not be closed: %s", error)
        finally:
            self._pool.give_back(connection)


async def describe_remote(name: str, addresses: list[Address], call_s: float) -> RemoteHost:
    """A host for an environment that its servers describe.

    Waits for: these. Unblocked by: them, or `call_s` for each. Raises ConfigError.
    """
    pool = ServerPool(addresses)
    try:
        return RemoteHost(name, await pool.describe(name, call_s), pool, call_s)
    except BaseException:
        pool.close()
        raise
