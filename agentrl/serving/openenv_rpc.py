"""OpenEnv's part of MCP: tools by JSON-RPC, over HTTP or a WebSocket, and the making of sessions that have an id."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from agentrl.envs.wire import ServerBusyError
from agentrl.serving.openenv_named import Acting, OpenEnvSessions
from agentrl.serving.openenv_session import INVALID, Data
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


Act = Callable[[Acting, Data], Awaitable[Data]]
_read_request = msgspec.json.Decoder(_Request)


class _RpcError(Exception):
    """Becomes the error of a response."""

    def __init__(self, code: int, message: str, data: Data | None = None) -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message, "data": data}


async def answer_rpc(sessions: OpenEnvSessions, data: bytes | str, own: Acting | None = None) -> Data:
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
    except EpisodeError as error:
        code = _INVALID_PARAMS if error.failure.kind == INVALID else _INTERNAL
        return _response(request.id, error=_RpcError(code, error.failure.message).error)


def _response(request_id: str | int | None, result: Any = None, error: Data | None = None) -> Data:
    outcome = {"result": result} if error is None else {"error": error}
    return {"jsonrpc": "2.0", "id": request_id, **outcome}


async def _answer(sessions: OpenEnvSessions, request: _Request, own: Acting | None) -> Any:
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
    return {"session_id": name, **await _in_named(sessions, name, lambda session: session.act("close"))}


async def _in_session(sessions: OpenEnvSessions, request: _Request, own: Acting | None, act: Act) -> Data:
    """Act in the connection's session, or the one that is named, or one of the moment."""
    name = request.params.get("session_id")
    if own is not None:
        return await act(own, request.params)
    if name:
        return await _in_named(sessions, str(name), lambda session: act(session, request.params))
    fresh = sessions.new()
    try:
        return await act(fresh, request.params)
    finally:
        await fresh.close()


async def _in_named(sessions: OpenEnvSessions, name: str, act: Callable[[Acting], Awaitable[Data]]) -> Data:
    try:
        return await act(sessions.named(name))
    except EpisodeError as error:
        if error.failure.kind == "lost":
            raise _RpcError(_INVALID_PARAMS, error.failure.message) from error
        raise


async def _list(session: Acting, params: Data) -> Data:
    listed = await session.act("tools")
    return {"tools": [{"inputSchema" if k == "input_schema" else k: v for k, v in t.items()} for t in listed["tools"]]}


async def _call(session: Acting, params: Data) -> Data:
    name, arguments = params.get("name"), params.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise _RpcError(_INVALID_PARAMS, "Missing 'name' in params")
    called = await session.act("call", msgspec.json.encode({"tool_name": name, "arguments": arguments}))
    text = called["observation"]["result"]
    return {"content": [{"type": "text", "text": text}], "data": text, "isError": False}
