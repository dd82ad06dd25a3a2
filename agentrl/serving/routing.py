"""Finds the process of a server that has a session, and hands it the calls that came to another one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentrl.envs.connection import Address, ServerConnection
from agentrl.envs.wire import Call, Describe, Open, Sample, ServerBusyError
from agentrl.serving.board import Number
from agentrl.serving.options import RETRY_AFTER_S
from agentrl.serving.table import SessionTable
from agentrl.types.errors import EpisodeError

_MARGIN_S = 30.0


class CallRouter:
    """Carries calls out here, or by the process that their session's handle names.

    It holds as many connections to a process as calls are under way there.
    """

    def __init__(self, table: SessionTable, sockets: Mapping[int, Path], token: str | None) -> None:
        """`sockets` has where each of the other processes listens."""
        self._table = table
        self._addresses = {str(n): Address(f"process {n}", token, path) for n, path in sockets.items()}
        self._idle: dict[str, list[ServerConnection]] = {worker: [] for worker in self._addresses}
        self._deadline_s = 2 * table.limits.call_s + _MARGIN_S  # one call may be before it

    async def answer(self, call: Call) -> object:
        """What the call gives.

        Waits for: the session. Unblocked by: its deadlines. Raises EpisodeError.
        """
        worker = self._place(call)
        if worker not in self._addresses:
            return await self._table.answer(call)
        self._table.board.add(Number.RELAYED)
        idle = self._idle[worker]
        connection = idle.pop() if idle else ServerConnection(self._addresses[worker])
        try:
            return await connection.call(call, self._deadline_s, patience_s=0.0)
        except EpisodeError as error:
            if isinstance(call, Open) and error.failure.kind == "lost":
                raise ServerBusyError(error.failure.message, RETRY_AFTER_S) from error
            raise
        finally:
            idle.append(connection)

    def close(self) -> None:
        """Close the connections that are not in use."""
        for connection in [connection for idle in self._idle.values() for connection in idle]:
            connection.drop()

    def _place(self, call: Call) -> str:
        """The process that is to carry a call out; empty if that may be any."""
        if isinstance(call, Describe | Sample):
            return ""
        if isinstance(call, Open):
            return str(call.worker)
        return call.session.partition("-")[0]
