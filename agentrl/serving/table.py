"""The sessions of one process of a server: opened, found, and ended when nobody uses them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack

from agentrl.envs.wire import Call, Close, Describe, Open, Opened, OpenEnv, Sample, ServerBusyError, lost
from agentrl.protocols import EnvironmentHost
from agentrl.serving.board import Board, Number
from agentrl.serving.options import RETRY_AFTER_S, SessionLimits
from agentrl.serving.session import Session
from agentrl.types.environment import Origin
from agentrl.types.errors import Boundary, EpisodeError, boundary

_GONE_KEPT = 1000
_FAILURES_IN_A_ROW = 3
_SAMPLED_AT_MOST = 1000


class SessionTable:
    """Sessions by handle, which begins with the number of the process that has them; it is secret but for that.

    Example of a handle: ``0-4rQx5jXv0dJm3uQnHq2l9A``.
    """

    def __init__(self, hosts: Mapping[str, EnvironmentHost], limits: SessionLimits, board: Board) -> None:
        self.hosts, self.limits, self.board = dict(hosts), limits, board
        self.failing: dict[str, str] = {}
        """Environments of which the last sessions could not be made, and why."""
        self.openenv: dict[str, Callable[[OpenEnv], Awaitable[object]]] = {}
        """By environment, who carries out what clients of OpenEnv want of sessions that they have named."""
        self._failures: Counter[str] = Counter()
        self._sessions: dict[str, Session] = {}
        self._opens: dict[str, asyncio.Task[str]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._gone: OrderedDict[str, str] = OrderedDict()

    @property
    def free(self) -> int:
        """Sessions that the whole server would still take."""
        return max(0, self.limits.most - self.board.total(Number.SESSIONS))

    def __len__(self) -> int:
        return len(self._sessions)

    async def answer(self, call: Call) -> object:
        """Carry a call out.

        Waits for: calls of the session before it, and the environment. Unblocked by: their deadlines.

        Raises:
            EpisodeError: the environment failed, or the call cannot be carried out; the kind says why.
        """
        match call:
            case Open():
                return await self._open(call)
            case Describe():
                return self.host(call.environment).description
            case Sample():
                return await self._sample(call)
            case Close():
                await self._close(call)
                return None
            case OpenEnv():
                self.host(call.environment)
                return await self.openenv[call.environment](call)
            case _:
                return await self.find(call.session).answer(call, self.limits.call_s)

    def host(self, name: str) -> EnvironmentHost:
        """Where instances of an environment live. Raises EpisodeError (kind unknown)."""
        if name not in self.hosts:
            raise EpisodeError(
                Boundary.ENVIRONMENT,
                "unknown",
                f"this server has no environment '{name}'; it has {', '.join(self.hosts)}",
            )
        return self.hosts[name]

    def find(self, handle: str) -> Session:
        """A session that lives. Raises EpisodeError (kind lost), which says how it ended if that is known."""
        session = self._sessions.get(handle)
        if session is None:
            why = self._gone.get(handle, "it never was, or its process ended, or it ended a while ago")
            raise lost(f"the server has no session {handle}: {why}")
        return session

    def has(self, handle: str) -> bool:
        """Whether a session lives."""
        return handle in self._sessions

    async def reap(self) -> None:
        """End the sessions that are too old, or that nobody has used for too long."""
        now = time.monotonic()
        for session in list(self._sessions.values()):
            if now - session.begun_s > self.limits.session_s:
                self.board.add(Number.EXPIRED)
                self._end_later(session, f"it was {self.limits.session_s:g} s old, the most that the server allows")
            elif now - session.used_s > self.limits.idle_s and not session.is_busy:
                self.board.add(Number.REAPED)
                self._end_later(session, f"nobody used it for {self.limits.idle_s:g} s")

    async def close(self) -> None:
        """End all sessions, and the hosts."""
        for session in list(self._sessions.values()):
            self._end_later(session, "the server is stopping")
        if self._ending:
            await asyncio.wait(self._ending, timeout=self.limits.call_s)
        for host in self.hosts.values():
            await host.close()

    async def _open(self, call: Open) -> Opened:
        """The session that a call opens, the first time that it comes; it is made to the end if its caller is gone."""
        opening = self._opens.get(call.id)
        if opening is None:
            opening = self._opens[call.id] = asyncio.create_task(self._make(call), name="open-session")
        else:
            self.board.add(Number.REPEATED)
        try:
            return Opened(await asyncio.shield(opening), self.free)
        except EpisodeError:
            self._opens.pop(call.id, None)  # nothing was opened: the same call may be tried again
            raise

    async def _make(self, call: Open) -> str:
        host = self.host(call.environment)
        self._check_room()
        self.board.add(Number.SESSIONS)
        handle = f"{self.board.worker}-{secrets.token_urlsafe(16)}"
        stack = AsyncExitStack()
        stack.callback(self._forget, handle, call.id)  # first, so that it comes last: the instance is freed by then
        try:
            origin = None if call.snapshot is None else Origin(snapshot=call.snapshot, token=call.token)
            with boundary(Boundary.ENVIRONMENT, "create"):
                instance = await stack.enter_async_context(host.open(call.task, origin))
        except BaseException as error:
            self.board.add(Number.SESSIONS, -1)
            self.board.add(Number.FAILED_OPENS)
            self._note_failed(call.environment, error)
            raise
        self._failures.pop(call.environment, None)
        self.failing.pop(call.environment, None)
        session = Session(handle, call.environment, instance, stack, call.token, self.board)
        self._sessions[handle] = session
        self.board.add(Number.OPENED)
        return handle

    def _note_failed(self, environment: str, error: BaseException) -> None:
        """A single one may be its task's fault, or its snapshot's."""
        self._failures[environment] += 1
        if self._failures[environment] >= _FAILURES_IN_A_ROW:
            self.failing[environment] = str(error)

    def _check_room(self) -> None:
        if self.board.of(self.board.worker, Number.DRAINING):
            self.board.add(Number.REFUSED)
            raise ServerBusyError("the server is stopping and takes no more sessions", RETRY_AFTER_S)
        if not self.free:
            self.board.add(Number.REFUSED)
            raise ServerBusyError(
                f"the server has {self.limits.most} sessions, the most that it takes; ask again, or start another, "
                "or this one with a greater --max-sessions",
                RETRY_AFTER_S,
            )

    async def _sample(self, call: Sample) -> object:
        if len(call.ordinals) > _SAMPLED_AT_MOST:
            raise EpisodeError(
                Boundary.CONTRACT,
                "protocol",
                f"{len(call.ordinals)} tasks in one call; ask for {_SAMPLED_AT_MOST} at most",
            )
        with boundary(Boundary.ENVIRONMENT, "sample"):
            return await self.host(call.environment).sample(call.split, call.seed, call.ordinals)

    async def _close(self, call: Close) -> None:
        """End a session; one in whose midst a call is ends behind it, and nobody waits for that."""
        session = self._sessions.get(call.session)
        if session is None:
            return
        session.check_holder(call.token)
        self.board.add(Number.CLOSED)
        ending = self._end_later(session, "it was closed")
        if not session.is_busy:
            await asyncio.shield(ending)

    def _end_later(self, session: Session, why: str) -> asyncio.Task[None]:
        """End a session in the background; from now on it is not found."""
        self._sessions.pop(session.handle, None)
        self._note_gone(session.handle, why)
        ending = asyncio.create_task(session.end(why), name="end-session")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    def _forget(self, handle: str, call_id: str) -> None:
        """The instance is freed: there is room for another."""
        session = self._sessions.pop(handle, None)
        if session is not None:
            self._note_gone(handle, session.why_ended)
        self._opens.pop(call_id, None)
        self.board.add(Number.SESSIONS, -1)

    def _note_gone(self, handle: str, why: str) -> None:
        self._gone[handle] = why
        while len(self._gone) > _GONE_KEPT:
            self._gone.popitem(last=False)
