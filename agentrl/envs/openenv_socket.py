"""One session of an OpenEnv server: its WebSocket, one call at a time, and what its error frames mean.

Calls block, so they belong in a thread. An environment's worker runs its event loop only while a call of the run is
being answered, and a policy may think for minutes: the thread of this socket answers the server's pings meanwhile.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any, TypeVar

import msgspec
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.sync.client import ClientConnection, connect

from agentrl.types.errors import Boundary, EpisodeError

Record = TypeVar("Record")
_MAX_FRAME_BYTES = 100 * 2**20  # what OpenEnv's own clients take
_CLOSE_S = 5.0
_NOT_OPENENV = "give the base URL of an OpenEnv server"


class Schema(msgspec.Struct, frozen=True):
    """What ``GET /schema`` says of an environment; `action` is a JSON Schema of what a step takes."""

    action: dict[str, Any]


class Reply(msgspec.Struct, frozen=True):
    """The data of an observation frame. A reward of None is no reward; True and False are 1 and 0."""

    observation: dict[str, Any]
    reward: bool | float | None = None
    done: bool = False


class Refusal(msgspec.Struct, frozen=True):
    """The data of an error frame; `errors` has what is wrong with each field of an action."""

    message: str = ""
    code: str = ""
    errors: list[dict[str, Any]] = []


class _Frame(msgspec.Struct, frozen=True):
    type: str
    data: msgspec.Raw = msgspec.Raw(b"{}")


class ActionRefusedError(Exception):
    """The server found an action that does not fit its schema: the policy's mistake."""


class ServerFullError(Exception):
    """The server holds as many sessions as it may."""


class OpenEnvSocket:
    """A session that lives as long as its connection does.

    Not safe for two threads at once, but for `close`. After a call that was not answered the session is gone: a late
    answer would be taken for that of the next action.
    """

    def __init__(self, url: str, token: str | None, connect_s: float, call_s: float) -> None:
        self._url = url.rstrip("/")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._connect_s, self._call_s = connect_s, call_s
        self._connection: ClientConnection | None = None

    def schema(self) -> Schema:
        """What the environment takes. Raises EpisodeError."""
        request = urllib.request.Request(f"{self._url}/schema", headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._connect_s) as response:
                return msgspec.json.decode(response.read(_MAX_FRAME_BYTES), type=Schema)
        except urllib.error.HTTPError as error:
            raise self._unreachable(f"/schema answers {error.code}") from error
        except msgspec.DecodeError as error:
            raise self._unreachable(f"/schema is none of OpenEnv's: {error}") from error
        except (OSError, ValueError) as error:
            raise self._unreachable(f"{type(error).__name__}: {error}") from error

    def open(self) -> None:
        """Connect: a new session. Raises EpisodeError."""
        scheme, _, rest = self._url.partition("://")
        try:
            self._connection = connect(
                f"{'wss' if scheme == 'https' else 'ws'}://{rest}/ws",
                additional_headers=self._headers,
                compression=None,
                open_timeout=self._connect_s,
                close_timeout=_CLOSE_S,
                max_size=_MAX_FRAME_BYTES,
            )
        except (OSError, InvalidHandshake, InvalidURI) as error:
            raise self._unreachable(f"{type(error).__name__}: {error}") from error

    def call(self, kind: str, data: dict[str, Any]) -> Reply:
        """The observation that answers a ``reset`` or a ``step``.

        Raises:
            ActionRefusedError: the action does not fit the schema; the session goes on.
            ServerFullError: there was no place for this session.
            EpisodeError: the environment failed, or the session is gone.
        """
        frame = self._exchange(kind, msgspec.json.encode({"type": kind, "data": data}))
        if frame.type == "error":
            self._raise(self._read(frame.data, Refusal))
        if frame.type != "observation":
            self.close()
            raise EpisodeError(Boundary.ENVIRONMENT, "protocol", f"{self._url} answers {kind} with a {frame.type}")
        return self._read(frame.data, Reply)

    def close(self) -> None:
        """End the session; a call that waits for its answer fails. Safe to call twice and from any thread."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _exchange(self, kind: str, request: bytes) -> _Frame:
        connection = self._connection
        if connection is None:
            raise self._lost("it was closed before")
        try:
            self._send(connection, request)
            answer = connection.recv(timeout=self._call_s)
        except TimeoutError:
            self.close()
            raise EpisodeError(
                Boundary.TIMEOUT, f"environment.{kind}", f"{self._url} has not answered within {self._call_s:g} s"
            ) from None
        except ConnectionClosed as error:
            self.close()
            raise self._lost(str(error)) from error
        return self._read(answer, _Frame)

    @staticmethod
    def _send(connection: ClientConnection, request: bytes) -> None:
        """A server that refuses a session says so and closes, perhaps before this: what it said can still be read."""
        try:
            connection.send(request, text=True)
        except ConnectionClosed:
            return

    def _read(self, data: bytes | str | msgspec.Raw, kind: type[Record]) -> Record:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            self.close()
            message = f"{self._url} sends what is no frame of OpenEnv's: {error}"
            raise EpisodeError(Boundary.ENVIRONMENT, "protocol", message) from error

    def _raise(self, refusal: Refusal) -> None:
        match refusal.code:
            case "VALIDATION_ERROR":
                faults = "; ".join(f"{'.'.join(map(str, e.get('loc', [])))}: {e.get('msg')}" for e in refusal.errors)
                raise ActionRefusedError(faults or refusal.message)
            case "CAPACITY_REACHED":
                self.close()
                raise ServerFullError(refusal.message)
            case "EXECUTION_ERROR":
                raise EpisodeError(Boundary.ENVIRONMENT, "step", f"{self._url}: {refusal.message}")
            case "FACTORY_ERROR" | "SESSION_ERROR":
                self.close()
                raise EpisodeError(Boundary.ENVIRONMENT, "create", f"{self._url}: {refusal.message}")
            case _:
                self.close()
                message = f"{self._url} refuses what it was sent: {refusal.code} {refusal.message}"
                raise EpisodeError(Boundary.ENVIRONMENT, "protocol", message)

    def _unreachable(self, why: str) -> EpisodeError:
        return EpisodeError(Boundary.ENVIRONMENT, "create", f"no session at {self._url}: {why}; {_NOT_OPENENV}")

    def _lost(self, why: str) -> EpisodeError:
        return EpisodeError(Boundary.ENVIRONMENT, "lost", f"the session at {self._url} is gone: {why}")
