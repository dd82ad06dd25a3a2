"""The client's side of the native protocol of environment servers: one WebSocket, one call at a time.

A connection that is lost is made anew, and the call sent again under its id, which does nothing twice. A call that was
given up takes its connection with it, so that its answer is nobody's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus, InvalidURI

from agentrl import codec
from agentrl.envs.wire import (
    CONNECT_PATH,
    PROTOCOL,
    RESULTS,
    VERSION,
    Hello,
    ReceivedAnswer,
    Request,
    ServerBusyError,
    lost,
)
from agentrl.types.errors import Boundary, ConfigError, EpisodeError

CONNECT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_UNAUTHORIZED = 401
_START_ONE = "start one with `agentrl env serve`"


class ServerUnreachableError(Exception):
    """A server does not answer; nobody knows whether what was sent has reached it."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is; `socket` is the file of a Unix socket that stands in place of the URL's host.

    Example: ``Address("http://10.0.0.5:8100", token="secret")``.
    """

    url: str
    token: str | None = None
    socket: Path | None = None


class ServerConnection:
    """Calls an environment server. `hello` is what it said when the connection was made last."""

    def __init__(self, address: Address, counts: Counter[str] | None = None) -> None:
        """Into `counts` goes how often a connection was lost, and how many answers came to nobody."""
        self.address = address
        self.counts = Counter[str]() if counts is None else counts
        self.hello: Hello | None = None
        self._socket: ClientConnection | None = None
        self._absence: str | None = None  # why the server could not be reached when it was tried last

    async def open(self) -> Hello:
        """Make the connection unless it is there.

        Waits for: the server. Unblocked by: it, or `CONNECT_S`.

        Raises:
            ConfigError: it is not such a server, or not of this version, or wants another token.
            ServerUnreachableError: it does not answer.
        """
        await self._opened()
        assert self.hello is not None
        return self.hello

    async def call(self, call: Request, deadline_s: float, patience_s: float | None = None) -> Any:
        """What a call gives; its type is that in `RESULTS`.

        Waits for: the answer. Unblocked by: it, the deadline, or a server that could not be reached for `patience_s`,
        which is the deadline unless it is given.

        Raises:
            EpisodeError: what the call ran into there; kind ``lost`` if the server cannot be reached, or the deadline.
        """
        method = str(type(call).__struct_config__.tag)
        message = codec.encode(call)
        self._check_size(message, method)
        is_answered = False
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self._delivered(call.id, message, deadline_s if patience_s is None else patience_s)
                is_answered = True
        except TimeoutError:
            if self._absence is not None:
                raise lost(self._absence) from None
            text = f"no answer of {self.address.url} within {deadline_s:g} s"
            raise EpisodeError(Boundary.TIMEOUT, f"environment.{method}", text) from None
        finally:
            if not is_answered:
                self.drop()
        return _result(call, answer)

    def drop(self) -> None:
        """Close the connection without a word; the next call makes another."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.transport.abort()

    async def _delivered(self, call_id: str, message: bytes, patience_s: float) -> ReceivedAnswer:
        """The answer to a message, sent as often as connections are lost.

        Waits for: the server. Unblocked by: it, or its absence for `patience_s`; the caller sets the deadline.
        """
        loop = asyncio.get_running_loop()
        until, pause_s = loop.time() + patience_s, 0.0
        while True:
            try:
                return await self._answer_to(await self._opened(), call_id, message)
            except (ServerUnreachableError, ConnectionClosed, OSError) as error:
                self._note_lost(error, is_over=loop.time() >= until)
            except ConfigError as error:
                raise lost(str(error)) from error
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)

    def _note_lost(self, error: Exception, is_over: bool) -> None:
        """A connection was lost, or could not be made: raises EpisodeError (kind lost) if no other is to be tried."""
        self.drop()
        self.counts["lost connections"] += 1
        if not isinstance(error, ServerUnreachableError):
            return
        self._absence = f"environment server {self.address.url} cannot be reached: {error}"
        if is_over:
            raise lost(self._absence) from error

    async def _answer_to(self, socket: ClientConnection, call_id: str, message: bytes) -> ReceivedAnswer:
        await socket.send(message)
        while True:
            frame = await socket.recv(decode=False)
            try:
                answer = msgspec.msgpack.decode(frame, type=ReceivedAnswer)
            except msgspec.MsgspecError as error:
                text = f"what {self.address.url} answered is not of this protocol: {error}"
                raise EpisodeError(Boundary.ENVIRONMENT, "answer", text) from error
            if answer.id in (call_id, ""):
                return answer
            self.counts["answers to nobody"] += 1

    async def _opened(self) -> ClientConnection:
        if self._socket is None:
            socket = await self._connect()
            try:
                async with asyncio.timeout(CONNECT_S):
                    self.hello = _checked(self.address.url, await socket.recv(decode=False))
            except (ConnectionClosed, TimeoutError) as error:
                socket.transport.abort()
                raise ServerUnreachableError(f"it said nothing ({type(error).__name__} {error})") from error
            except BaseException:
                socket.transport.abort()
                raise
            self._socket, self._absence = socket, None
        return self._socket

    async def _connect(self) -> ClientConnection:
        url, token = self.address.url, self.address.token
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        settings: dict[str, Any] = {
            "additional_headers": headers,
            "compression": None,
            "max_size": None,
            "open_timeout": CONNECT_S,
            "proxy": None,
        }
        try:
            if self.address.socket is not None:
                return await unix_connect(str(self.address.socket), f"ws://localhost{CONNECT_PATH}", **settings)
            return await connect(websocket_url(url), **settings)
        except InvalidStatus as error:
            raise _refusal(url, error.response.status_code) from error
        except (OSError, TimeoutError, ConnectionClosed, InvalidMessage) as error:  # it may end in the midst of a word
            raise ServerUnreachableError(f"{type(error).__name__} {error}".rstrip()) from error
        except (InvalidHandshake, InvalidURI) as error:
            raise ConfigError(f"{url} is no environment server ({error}); {_START_ONE}") from error

    def _check_size(self, message: bytes, method: str) -> None:
        if self.hello is not None and len(message) > self.hello.max_message_bytes:
            raise EpisodeError(
                Boundary.ENVIRONMENT,
                "too_large",
                f"{method} would send {len(message)} bytes to {self.address.url}, which takes "
                f"{self.hello.max_message_bytes}; start it with a greater --max-message-mb",
            )


def websocket_url(url: str) -> str:
    """Where a server of that URL takes connections. Raises ConfigError.

    Example: ``http://10.0.0.5:8100`` gives ``ws://10.0.0.5:8100/connect``.
    """
    scheme, _, rest = url.partition("://")
    schemes = {"http": "ws", "https": "wss"}
    if scheme not in schemes or not urlsplit(url).hostname:
        raise ConfigError(f"environment.servers: '{url}' is no URL; write http://HOST:PORT")
    return f"{schemes[scheme]}://{rest.rstrip('/')}{CONNECT_PATH}"


def _checked(url: str, frame: bytes) -> Hello:
    """A server's first words, if it speaks this version of the protocol. Raises ConfigError."""
    words: dict[str, Any] = {}
    with suppress(msgspec.MsgspecError):
        words = msgspec.json.decode(frame, type=dict[str, Any])
    if words.get("protocol") != PROTOCOL:
        raise ConfigError(f"{url} is no environment server of agentrl; {_START_ONE}")
    if words.get("version") != VERSION:
        raise ConfigError(
            f"{url} speaks version {words.get('version')} of its protocol, and this agentrl version {VERSION}; install "
            f"agentrl {words.get('agentrl')} here, or this one there"
        )
    return msgspec.convert(words, Hello)


def _refusal(url: str, status: int) -> Exception:
    if status == _UNAUTHORIZED:
        return ConfigError(
            f"{url} wants another token; put the content of the server's --token-file into the variable that "
            "environment.token_variable names"
        )
    if status >= 500:  # it is not up, or what stands before it finds none
        return ServerUnreachableError(f"HTTP {status}")
    return ConfigError(f"{url} is no environment server of agentrl (HTTP {status} at {CONNECT_PATH}); {_START_ONE}")


def _result(call: Request, answer: ReceivedAnswer) -> Any:
    failure = answer.failure
    if failure is not None and answer.retry_after_s is not None:
        raise ServerBusyError(failure.message, answer.retry_after_s)
    if failure is not None:
        raise EpisodeError(failure.boundary, failure.kind, failure.message, failure.trace)
    try:
        return codec.decode(bytes(answer.result), RESULTS[type(call)])
    except msgspec.ValidationError as error:
        method = type(call).__struct_config__.tag
        raise EpisodeError(Boundary.ENVIRONMENT, "answer", f"{method}() returned {error}") from error
