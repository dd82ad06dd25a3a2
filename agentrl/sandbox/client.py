"""The side of whoever uses sandboxes: a connection to the keeper for each, made anew when it was lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path

from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage

from agentrl import codec
from agentrl.sandbox.files import FILES_S
from agentrl.sandbox.wire import (
    CHUNK_BYTES,
    MOST_FRAME_BYTES,
    SOCKET_VARIABLE,
    Answer,
    Attach,
    Close,
    Describe,
    Forget,
    Keep,
    Open,
    Outcome,
    Pack,
    Read,
    Recall,
    Remember,
    Request,
    Run,
    Snapshot,
    Stop,
    Unpack,
    Write,
)
from agentrl.types.errors import Boundary, ConfigError, EpisodeError
from agentrl.types.sandbox import Command, CommandResult, Guarantee, SandboxSpec

_CONNECT_S, _CALL_S = 30.0, 60.0
_SLACK_S = 60.0  # for the keeper to kill what is at its deadline, and for other commands of the sandbox


class KeeperConnection:
    """Calls the keeper, one call at a time; one that was given up takes the connection with it."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._is_busy = False

    @classmethod
    async def open(cls, path: Path) -> KeeperConnection:
        """Connect. Raises EpisodeError (boundary sandbox, kind lost) if the keeper is gone."""
        try:
            socket = await unix_connect(
                str(path),
                "ws://keeper/",
                max_size=MOST_FRAME_BYTES,
                compression=None,
                ping_interval=None,
                open_timeout=_CONNECT_S,
            )
        except (OSError, TimeoutError, InvalidHandshake, InvalidMessage) as error:
            raise _gone(f"{type(error).__name__}: {error}") from error
        return cls(socket)

    async def call(self, call: Request, deadline_s: float, content: AsyncIterable[bytes] | None = None) -> Answer:
        """The answer to a call, behind which `content` is sent.

        Waits for: it. Unblocked by: it, the deadline, or the keeper's end. Raises EpisodeError.
        """
        async for chunk in self.stream(call, deadline_s, content, has_frames=False):
            return codec.decode(chunk, Answer)
        raise AssertionError

    async def stream(
        self, call: Request, deadline_s: float, content: AsyncIterable[bytes] | None = None, has_frames: bool = True
    ) -> AsyncGenerator[bytes, None]:
        """The frames of an answer, of which the last is the answer itself. Raises EpisodeError."""
        self._is_busy = True
        try:
            async with asyncio.timeout(deadline_s):
                await self._socket.send(codec.encode(call))
                if content is not None:
                    await self._send_content(content)
                while has_frames and (frame := await self._socket.recv(decode=False)):
                    yield frame
                data = await self._socket.recv(decode=False)
                self._is_busy = False
        except ConnectionClosed as error:
            raise _gone(f"its connection ended: {error}") from error
        except TimeoutError:
            kind = f"sandbox.{type(call).__struct_config__.tag}"
            raise EpisodeError(Boundary.TIMEOUT, kind, f"the keeper gave no answer within {deadline_s:g} s") from None
        finally:
            if self._is_busy:
                self.drop()
        failure = codec.decode(data, Answer).failure
        if failure is not None:
            raise EpisodeError(failure.boundary, failure.kind, failure.message, failure.trace)
        yield data

    @property
    def is_open(self) -> bool:
        """Whether it takes calls; one whose last answer was not read to its end does not."""
        return not (self._is_busy or self._socket.transport.is_closing())

    def drop(self) -> None:
        """Close it at once."""
        self._socket.transport.abort()

    async def close(self) -> None:
        """Close it."""
        with suppress(ConnectionClosed, OSError):
            await self._socket.close()

    async def _send_content(self, content: AsyncIterable[bytes]) -> None:
        async for chunk in content:
            for start in range(0, len(chunk), CHUNK_BYTES):
                await self._socket.send(chunk[start : start + CHUNK_BYTES])
        await self._socket.send(b"")


class KeptSandboxClient:
    """A sandbox that a keeper holds; implements `Sandbox`."""

    def __init__(self, path: Path, connection: KeeperConnection, handle: str, token: int) -> None:
        self._path, self._connection, self._handle, self._token = path, connection, handle, token
        self._is_left = False

    async def run(self, command: Command, effect_id: str) -> CommandResult:
        """Run a command at most once under this id."""
        answer = await self._call(Run(command, effect_id), command.timeout_s + _SLACK_S)
        assert answer.result is not None
        return answer.result

    async def outcome(self, effect_id: str) -> CommandResult | None:
        """What became of a command, None if it was never begun."""
        return (await self._call(Outcome(effect_id), _CALL_S + FILES_S)).result

    async def stop(self, effect_id: str) -> None:
        """End a command; asked by a connection of its own, since `run` may be waiting on the sandbox's."""
        await _ask(self._path, Stop(self._handle, self._token, effect_id), _CALL_S + _SLACK_S)

    async def write(self, path: str, content: AsyncIterable[bytes]) -> None:
        """Write a file."""
        await self._call(Write(path), FILES_S + _SLACK_S, content)

    async def unpack(self, archive: AsyncIterable[bytes], folder: str) -> None:
        """Unpack a tar archive."""
        await self._call(Unpack(folder), FILES_S + _SLACK_S, archive)

    async def read(self, path: str) -> AsyncIterator[bytes]:
        """The content of a file."""
        async with aclosing(self._frames(Read(path))) as frames:
            async for frame in frames:
                yield frame

    async def pack(self, folder: str) -> AsyncIterator[bytes]:
        """A folder as a tar archive."""
        async with aclosing(self._frames(Pack(folder))) as frames:
            async for frame in frames:
                yield frame

    async def snapshot(self) -> str:
        """Keep the files as they are."""
        answer = await self._call(Snapshot(), FILES_S + _SLACK_S)
        assert answer.text is not None
        return answer.text

    async def remember(self, state: bytes) -> None:
        """Keep some bytes beside the sandbox."""
        await self._call(Remember(state), _CALL_S)

    async def recall(self) -> bytes | None:
        """What was kept last."""
        return (await self._call(Recall(), _CALL_S)).data

    def handle(self) -> str:
        """Names the live sandbox."""
        return self._handle

    async def keep(self) -> str:
        """Let it live on for whoever knows the handle, which is returned."""
        await self._call(Keep(), _CALL_S)
        return self._handle

    async def detach(self) -> None:
        """Leave it alive."""
        self._is_left = True

    async def close(self) -> None:
        """End it, unless it was left alive or is another worker's by now; safe to call twice."""
        if not self._is_left:
            self._is_left = True
            try:
                await self._call(Close(), _CALL_S + _SLACK_S)
            except EpisodeError as error:
                if error.failure.kind not in ("lost", "fenced"):
                    raise
        await self._connection.close()

    async def _call(self, call: Request, deadline_s: float, content: AsyncIterable[bytes] | None = None) -> Answer:
        return await (await self._connected()).call(call, deadline_s, content)

    async def _frames(self, call: Request) -> AsyncGenerator[bytes, None]:
        held: bytes | None = None  # the last frame is the answer and no content
        async with aclosing((await self._connected()).stream(call, FILES_S + _SLACK_S)) as frames:
            async for frame in frames:
                if held is not None:
                    yield held
                held = frame

    async def _connected(self) -> KeeperConnection:
        """The connection; one that was lost is made anew, under the same token."""
        if not self._connection.is_open:
            self._connection.drop()
            self._connection = await KeeperConnection.open(self._path)
            await self._connection.call(Attach(self._handle, self._token), _CALL_S)
        return self._connection


class KeeperHost:
    """The sandboxes of a keeper."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of_run(cls) -> KeeperHost:
        """The sandboxes of the run that this process is of. Raises ConfigError if there is none."""
        return cls(_socket_of_run())

    async def guarantees(self) -> frozenset[Guarantee]:
        """What sandboxes here really enforce. Raises EpisodeError if the keeper is gone."""
        return (await _ask(self._path, Describe(), _CALL_S)).guarantees

    async def open(
        self, spec: SandboxSpec, snapshot: str | None = None, beside: str | None = None
    ) -> KeptSandboxClient:
        """A sandbox, empty or with the files of a snapshot; `beside` is the handle of one that the caller has.

        Raises EpisodeError if it cannot be had.
        """
        return await self._begin(Open(spec, snapshot, beside), 0, _OPEN_S)

    async def attach(self, handle: str, token: int) -> KeptSandboxClient:
        """A live sandbox; who used it under a smaller token no longer can. Raises EpisodeError (kind lost) if gone."""
        return await self._begin(Attach(handle, token), token, _CALL_S)

    async def forget(self, snapshot: str) -> None:
        """Remove a snapshot; one that is gone already is no error. Those that are left end with the run."""
        await _ask(self._path, Forget(snapshot), _CALL_S)

    async def close(self) -> None:
        """Nothing is held on this side."""

    async def _begin(self, call: Request, token: int, deadline_s: float) -> KeptSandboxClient:
        connection = await KeeperConnection.open(self._path)
        answer = await connection.call(call, deadline_s)
        assert answer.text is not None
        return KeptSandboxClient(self._path, connection, answer.text, token)


_OPEN_S = 3600.0  # the keeper has the deadline


async def _ask(path: Path, call: Request, deadline_s: float) -> Answer:
    """The answer to a call that needs no sandbox on its connection. Raises EpisodeError."""
    connection = await KeeperConnection.open(path)
    try:
        return await connection.call(call, deadline_s)
    finally:
        await connection.close()


def _socket_of_run() -> Path:
    path = os.environ.get(SOCKET_VARIABLE)
    if path is None:
        raise ConfigError(
            f"this environment needs sandboxes, and {SOCKET_VARIABLE} names no keeper of them; play it by agentrl, "
            "which starts one, or start one in your program by agentrl.sandbox.starting.running_keeper"
        )
    return Path(path)


def _gone(how: str) -> EpisodeError:
    return EpisodeError(Boundary.SANDBOX, "lost", f"the keeper of sandboxes is gone ({how})")
