"""OpenEnv's WebSockets, ``/ws`` and ``/mcp``: a connection is a session, and each step of its episode passes here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.parse import parse_qs

import msgspec

from agentrl.envs.wire import ServerBusyError
from agentrl.serving.native import Event, Receive, Send
from agentrl.serving.openenv_named import Acting, OpenEnvSessions
from agentrl.serving.openenv_rpc import answer_rpc
from agentrl.serving.openenv_session import INVALID, Data
from agentrl.serving.options import RETRY_AFTER_S
from agentrl.types.errors import EpisodeError

Answer = Callable[[Acting, str], Awaitable[Data]]
_FIRST_FRAME_S = 10.0
_log = logging.getLogger(__name__)


class _Frame(msgspec.Struct, frozen=True):
    type: str = ""
    data: msgspec.Raw = msgspec.Raw(b"{}")


_read_frame = msgspec.json.Decoder(_Frame)
_encode = msgspec.json.Encoder().encode


class _EndError(Exception):
    """A frame that is the connection's last."""

    def __init__(self, frame: Data) -> None:
        super().__init__(frame)
        self.frame = frame


class StepEndpoint:
    """``/ws``: reset, step and state; what fails is told by error frames, and the connection goes on."""

    def __init__(self, sessions: OpenEnvSessions) -> None:
        self._sessions = sessions

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        """One connection. Waits for: its frames. Unblocked by: these, its end, or pings that it leaves unanswered."""
        names = parse_qs(scope["query_string"].decode("latin-1")).get("session_id", [])
        await receive()
        await send({"type": "websocket.accept"})
        if names:
            await self._serve_named(receive, send, names[0])
        elif not self._sessions.table.free:
            await _turn_away(receive, send, self._full())
        else:
            session = self._sessions.new()
            try:
                await _converse(receive, send, session, self._answer)
            finally:
                await session.close()

    async def _serve_named(self, receive: Receive, send: Send, name: str) -> None:
        """A connection that has a session which was there before, and is there behind it."""
        session = self._sessions.named(name)
        try:
            await session.act("attach")
        except EpisodeError as error:
            await _turn_away(receive, send, _refusal("SESSION_ERROR", error.failure.message))
            return
        try:
            await _converse(receive, send, session, self._answer)
        finally:
            with suppress(EpisodeError):  # its process is gone, and the session with it
                await session.act("detach")

    async def _answer(self, session: Acting, text: str) -> Data:
        try:
            frame = _read_frame.decode(text)
        except msgspec.ValidationError as error:
            return _invalid(str(error))
        except msgspec.DecodeError as error:
            return _refusal("INVALID_JSON", f"Invalid JSON: {error}")
        try:
            return await self._act(session, frame)
        except ServerBusyError as error:
            full = self._sessions.full(error)
            raise _EndError(_refusal("CAPACITY_REACHED", full.pop("message"), **full)) from error
        except EpisodeError as error:
            if error.failure.kind == INVALID:
                return _invalid(error.failure.message)
            if error.failure.kind == "create":
                name = self._sessions.environment
                raise _EndError(_refusal("FACTORY_ERROR", str(error), factory_name=name)) from error
            return _refusal("EXECUTION_ERROR", str(error))

    async def _act(self, session: Acting, frame: _Frame) -> Data:
        match frame.type:
            case "step":
                return {"type": "observation", "data": await session.act("step", frame.data)}
            case "reset":
                return {"type": "observation", "data": await session.act("reset", frame.data)}
            case "state":
                return {"type": "state", "data": await session.act("state")}
            case "mcp":
                return {"type": "mcp", "data": await answer_rpc(self._sessions, bytes(frame.data), session)}
            case "close":
                raise _EndError({})
        return _refusal("UNKNOWN_TYPE", f"Unknown message type: {frame.type}")

    def _full(self) -> Data:
        most = self._sessions.table.limits.most
        full = self._sessions.full(
            ServerBusyError(f"the server has {most} sessions, the most that it takes", RETRY_AFTER_S)
        )
        return _refusal("CAPACITY_REACHED", full.pop("message"), **full)


class RpcEndpoint:
    """``/mcp``: bare JSON-RPC, in a session of the connection's own."""

    def __init__(self, sessions: OpenEnvSessions) -> None:
        self._sessions = sessions

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        """One connection. Waits for: its frames. Unblocked by: these, its end, or pings that it leaves unanswered."""
        await receive()
        await send({"type": "websocket.accept"})
        session = self._sessions.new()
        try:
            await _converse(receive, send, session, self._answer)
        finally:
            await session.close()

    async def _answer(self, session: Acting, text: str) -> Data:
        return await answer_rpc(self._sessions, text, session)


async def _converse(receive: Receive, send: Send, session: Acting, answer: Answer) -> None:
    """Answer frame after frame until the connection ends; a binary one is read as text, too."""
    try:
        while (event := await receive())["type"] == "websocket.receive":
            text = event.get("text")
            data = await answer(session, event["bytes"].decode(errors="replace") if text is None else text)
            await send({"type": "websocket.send", "text": _encode(data).decode()})
    except _EndError as end:
        await _say_last(send, end.frame)
    except OSError:  # the client is gone, and its session with it
        _log.debug("a connection ended before its answer")


async def _turn_away(receive: Receive, send: Send, frame: Data) -> None:
    """Say why there is no session, unasked, and end the connection once the client has spoken.

    A client of OpenEnv 0.3 whose first frame finds the connection closed does not read what was said.
    """
    await send({"type": "websocket.send", "text": _encode(frame).decode()})
    with suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_FRAME_S):
            if (await receive())["type"] == "websocket.receive":
                await _say_last(send, {})


async def _say_last(send: Send, frame: Data) -> None:
    if frame:
        await send({"type": "websocket.send", "text": _encode(frame).decode()})
    await send({"type": "websocket.close", "code": 1000})


def _invalid(fault: str) -> Data:
    """What is wrong with a frame or an action, as pydantic words it, which OpenEnv's clients expect."""
    place, _, _ = fault.partition(": ")
    errors = [{"type": "value_error", "loc": [place] if ": " in fault else [], "msg": fault, "input": None}]
    return _refusal("VALIDATION_ERROR", "Invalid message", errors=errors)


def _refusal(code: str, message: str, **more: object) -> Data:
    return {"type": "error", "data": {"message": message, "code": code, **more}}
