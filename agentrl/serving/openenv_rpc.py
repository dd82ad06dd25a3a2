"""OpenEnv's part of MCP: tools by JSON-RPC, over HTTP or a WebSocket, and sessions that HTTP can come back to."""

from __future__ import annotations

import secrets
from typing import Any, Literal

import msgspec

from agentrl.envs.wire import ServerBusyError
from agentrl.serving.board import Number
from agentrl.serving.openenv_session import ActionInvalidError, Data, OpenEnvSession
from agentrl.serving.table import SessionTable
from agentrl.types.errors import EpisodeError

_PARSE_ERROR, _INVALID_REQUEST, _NO_METHOD, _INVALID_PARAMS, _INTERNAL, _SERVER = (
    *(-32700, -32600, -32601, -32602),
    *(-32603, -32000),
)


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, Any] = {}
    id: str | int | None = None


_read_request = msgspec.json.Decoder(_Request)


class _RpcError(Exception):
    """Becomes the error of a response."""

    def __init__(self, code: int, message: str, data: Data | None = None) -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message, "data": data}


class OpenEnvSessions:
    """Sessions of one environment that clients name by id; each lives as long as the table has it."""

    def __init__(self, table: SessionTable, environment: str) -> None:
        self.table, self.environment = table, environment
        self._sessions: dict[str, OpenEnvSession] = {}
        self._attached: set[str] = set()

    def new(self) -> OpenEnvSession:
        """A session that nobody can name."""
        return OpenEnvSession(self.table, self.environment)

    async def create(self) -> str:
        """The id of a new session. Raises EpisodeError."""
        self._sessions = {name: session for name, session in self._sessions.items() if session.lives}
        session = self.new()
        await session.begin()
        name = f"{self.table.board.worker}-{secrets.token_urlsafe(16)}"
        self._sessions[name] = session
        return name

    def find(self, name: object) -> OpenEnvSession:
        """The session of that id. Raises LookupError."""
        session = self._sessions.get(name) if isinstance(name, str) else None
        if session is None:
            raise LookupError(f"Unknown session_id: {name}")
        return session

    def attach(self, name: str) -> OpenEnvSession:
        """The session for a connection that has it alone. Raises LookupError."""
        session = self.find(name)
        if name in self._attached:
            raise LookupError(f"Session {name} already has an attached WebSocket")
        self._attached.add(name)
        return session

    async def detach(self, name: str) -> None:
        """Let another connection have it; one that was closed meanwhile ends."""
        self._attached.discard(name)
        if name not in self._sessions:
            return
        if self._sessions[name].is_closing:
            await self._sessions.pop(name).close()

    async def close(self, name: str) -> bool:
        """End a session; one that a connection has ends with that, which gives False. Raises LookupError."""
        session = self.find(name)
        if name in self._attached:
            session.is_closing = True
            return False
        del self._sessions[name]
        await session.close()
        return True

    def full(self, error: ServerBusyError) -> Data:
        """How many sessions there are and may be, and what a client reads of it."""
        held = self.table.board.total(Number.SESSIONS)
        return {"message": str(error), "active_sessions": held, "max_sessions": self.table.limits.most}


async def answer_rpc(sessions: OpenEnvSessions, data: bytes | str, own: OpenEnvSession | None = None) -> Data:
    """The response to a request; `own` is the session of the connection that it came by."""
    try:
        request = _read_request.decode(data)
    except msgspec.ValidationError as error:
        return _response(None, error=_RpcError(_INVALID_REQUEST, f"Invalid request: {error}").error)
    except (msgspec.MsgspecError, UnicodeError) as error:
        return _response(None, error=_RpcError(_PARSE_ERROR, f"Parse error: {error}").error)
    try:
        return _response(request.id, await _answer(sessions, request, own))
    except _RpcError as error:
        return _response(request.id, error=error.error)
    except ServerBusyError as error:
        full = sessions.full(error)
        return _response(request.id, error=_RpcError(_SERVER, full.pop("message"), full).error)
    except ActionInvalidError as error:
        return _response(request.id, error=_RpcError(_INVALID_PARAMS, str(error)).error)
    except EpisodeError as error:
        return _response(request.id, error=_RpcError(_INTERNAL, str(error)).error)


def _response(request_id: str | int | None, result: Any = None, error: Data | None = None) -> Data:
    outcome = {"result": result} if error is None else {"error": error}
    return {"jsonrpc": "2.0", "id": request_id, **outcome}


async def _answer(sessions: OpenEnvSessions, request: _Request, own: OpenEnvSession | None) -> Any:
    match request.method:
        case "openenv/session/create" if own is None:
            return {"session_id": await sessions.create()}
        case "openenv/session/close":
            return await _close(sessions, request.params.get("session_id"))
        case "tools/list":
            return await _in_session(sessions, request, own, _list)
        case "tools/call":
            return await _in_session(sessions, request, own, _call)
    raise _RpcError(_NO_METHOD, f"Method not found: {request.method}")


async def _close(sessions: OpenEnvSessions, name: object) -> Data:
    if not isinstance(name, str) or not name:
        raise _RpcError(_INVALID_PARAMS, "Invalid params - 'session_id' is required")
    try:
        is_closed = await sessions.close(name)
    except LookupError as error:
        raise _RpcError(_INVALID_PARAMS, str(error.args[0])) from error
    return {"session_id": name, "closed": is_closed, **({} if is_closed else {"closing": True})}


async def _in_session(sessions: OpenEnvSessions, request: _Request, own: OpenEnvSession | None, act: Any) -> Any:
    """Act in the connection's session, or the one that is named, or one of the moment."""
    name = request.params.get("session_id")
    if own is not None:
        return await act(own, request.params)
    if name:
        try:
            return await act(sessions.find(name), request.params)
        except LookupError as error:
            raise _RpcError(_INVALID_PARAMS, str(error.args[0])) from error
    fresh = sessions.new()
    try:
        return await act(fresh, request.params)
    finally:
        await fresh.close()


async def _list(session: OpenEnvSession, params: Data) -> Data:
    tools = await session.tools()
    named = [{"inputSchema" if key == "input_schema" else key: value for key, value in t.items()} for t in tools]
    return {"tools": named}


async def _call(session: OpenEnvSession, params: Data) -> Data:
    name, arguments = params.get("name"), params.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise _RpcError(_INVALID_PARAMS, "Missing 'name' in params")
    if not isinstance(arguments, dict):
        raise _RpcError(_INVALID_PARAMS, "'arguments' must be an object")
    text = await session.call_tool(name, arguments)
    return {"content": [{"type": "text", "text": text}], "data": text, "isError": False}
