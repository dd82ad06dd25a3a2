"""Sessions that a client of OpenEnv comes back to by their id, whichever process of the server it reaches."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Protocol

import msgspec

from agentrl.envs.wire import OpenEnv, ServerBusyError, lost
from agentrl.serving.board import Number
from agentrl.serving.native import Answering
from agentrl.serving.openenv_session import Data, OpenEnvSession
from agentrl.serving.table import SessionTable


class Acting(Protocol):
    """A session of OpenEnv's, here or in another process."""

    async def act(self, operation: str, data: bytes | msgspec.Raw = b"{}") -> Data:
        """What the operation gives. Raises EpisodeError."""


class NamedSession:
    """A session by its id; calls go to the process that has it."""

    def __init__(self, calls: Answering, environment: str, name: str) -> None:
        self._calls, self._environment, self.name = calls, environment, name

    async def act(self, operation: str, data: bytes | msgspec.Raw = b"{}") -> Data:
        """What the operation gives; ``attach``, ``detach`` and ``close`` are some, too.

        Raises:
            EpisodeError: kind ``lost``: there is no such session; else as `OpenEnvSession.act` does.
        """
        call = OpenEnv(
            id=secrets.token_hex(16),
            session=self.name,
            environment=self._environment,
            operation=operation,
            data=bytes(data),
        )
        answer = await self._calls.answer(call)
        assert isinstance(answer, dict)
        return answer


@dataclass(slots=True)
class _Named:
    """A session of this process; `newest` is its last call, which may come again."""

    session: OpenEnvSession
    is_attached: bool = False
    is_closing: bool = False
    newest: tuple[str, asyncio.Task[Data] | None] = ("", None)


class OpenEnvSessions:
    """Sessions of one environment; those that have ids live as long as the table has them."""

    def __init__(self, table: SessionTable, calls: Answering, environment: str) -> None:
        self.table, self.environment = table, environment
        self._calls = calls
        self._named: dict[str, _Named] = {}
        table.openenv[environment] = self.answer

    def new(self) -> OpenEnvSession:
        """A session that nobody can name."""
        return OpenEnvSession(self.table, self.environment)

    def named(self, name: str) -> NamedSession:
        """The session of that id, if there is one."""
        return NamedSession(self._calls, self.environment, name)

    async def create(self) -> str:
        """The id of a new session. Raises EpisodeError."""
        self._named = {name: n for name, n in self._named.items() if n.is_attached or n.session.lives}
        session = self.new()
        await session.begin()
        name = f"{self.table.board.worker}-{secrets.token_urlsafe(16)}"
        self._named[name] = _Named(session)
        return name

    async def answer(self, call: OpenEnv) -> Data:
        """Carry out a call for a session of this process, once, however often it comes. Raises EpisodeError."""
        named = self._named.get(call.session)
        if named is None:
            raise lost(f"Unknown session_id: {call.session}")
        newest, task = named.newest
        if task is None or call.id != newest:
            task = asyncio.create_task(self._carry_out(named, call), name="openenv-call")
            named.newest = (call.id, task)
        return await asyncio.shield(task)

    def full(self, error: ServerBusyError) -> Data:
        """How many sessions there are and may be, and what a client reads of it."""
        held = self.table.board.total(Number.SESSIONS)
        return {"message": str(error), "active_sessions": held, "max_sessions": self.table.limits.most}

    async def _carry_out(self, named: _Named, call: OpenEnv) -> Data:
        match call.operation:
            case "attach":
                if named.is_attached:
                    raise lost(f"Session {call.session} already has an attached WebSocket")
                named.is_attached = True
                return {}
            case "detach":
                named.is_attached = False
                return await self._close(call.session, named) if named.is_closing else {}
            case "close":
                named.is_closing = True
                return (
                    {"closed": False, "closing": True} if named.is_attached else await self._close(call.session, named)
                )
        return await named.session.act(call.operation, call.data)

    async def _close(self, name: str, named: _Named) -> Data:
        self._named.pop(name, None)
        await named.session.close()
        return {"closed": True}
