"""One Docker engine: calls through the Docker SDK, and connections that carry the streams of commands.

The SDK blocks, so its calls run in threads, as many as there are calls at once. Streams do without it: it would hold a
thread for each, and what an engine sends together with its answer's head stays in a buffer that the SDK passes by.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from agentrl.process.threads import OwnThread
from agentrl.types.errors import Boundary, ConfigError, EpisodeError

try:
    import docker.errors
    import requests
except ModuleNotFoundError as error:
    raise ImportError(f"{error}: pip install 'agentrl[docker]'") from error

T = TypeVar("T")
STDOUT, STDERR = 1, 2
_UPGRADED = (101, 200)
_BUFFER_BYTES = 1 << 18
_MOST_HEAD_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 16
_SLACK_S = 5.0  # by which a thread that hangs may be later than the timeout of its socket
_REMOVAL_POLL_S = 0.05
_NOT_FOUND, _CONFLICT = 404, 409


class EngineSilentError(EpisodeError):
    """An engine does not answer; it may have done what it was asked."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(Boundary.SANDBOX, "unavailable", f"the Docker engine at {url} does not answer: {reason}")


class EngineRefusedError(EpisodeError):
    """An engine answered with an error; `status` is the HTTP status."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        super().__init__(Boundary.SANDBOX, "refused", f"the Docker engine at {url} answers {status}: {reason}")
        self.status, self.reason = status, reason


class CallThreads:
    """Threads for calls that block. One that hangs is left to itself, and the next call gets another."""

    def __init__(self, name: str, deadline_s: float) -> None:
        self._name, self._deadline_s = name, deadline_s
        self._idle: list[OwnThread] = []

    async def call(self, work: Callable[[], T]) -> T:
        """The result of `work`. Raises TimeoutError, or what it raises."""
        thread = self._idle.pop() if self._idle else OwnThread(self._name)
        result = thread.call(work)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await result
        finally:
            if result.cancelled():
                thread.end()
            else:
                self._idle.append(thread)

    def end(self) -> None:
        """Let them end."""
        while self._idle:
            self._idle.pop().end()


class EngineStream:
    """A connection that an engine has turned into the streams of a container or of a command."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def frames(self) -> AsyncIterator[tuple[int, bytes]]:
        """What arrives, with the number of its stream, up to the end of the connection."""
        number = left = 0
        while True:
            try:
                while not left:
                    head = await self._reader.readexactly(8)
                    number, left = head[0], int.from_bytes(head[4:], "big")
                data = await self._reader.read(min(left, _CHUNK_BYTES))
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            if not data:
                return
            left -= len(data)
            yield number, data

    async def send(self, data: bytes) -> None:
        """Write; waits until there is room. Raises ConnectionError once nobody reads."""
        self._writer.write(data)
        await self._writer.drain()

    def end_input(self) -> None:
        """Let the reader on the other side come to the end."""
        if not self._writer.is_closing():
            with contextlib.suppress(OSError):
                self._writer.write_eof()

    def close(self) -> None:
        """Drop the connection; safe to call twice."""
        self._writer.close()


class DockerEngine:
    """The engine at an URL, ``unix://PATH`` or ``tcp://HOST:PORT``. `taken` counts the places that it was given."""

    def __init__(self, url: str, deadline_s: float, most_calls: int) -> None:
        self.url = url
        self.taken = 0
        self._deadline_s, self._most_calls = deadline_s, most_calls
        self._threads = CallThreads("docker", deadline_s + _SLACK_S)
        self._client: Any = None
        parts = urlsplit(url)
        is_known = (parts.scheme == "unix" and parts.path) or (parts.scheme == "tcp" and parts.hostname and parts.port)
        if not is_known:
            raise ConfigError(
                f"sandbox 'docker': host {url} is neither unix://PATH nor tcp://HOST:PORT; forward the engine's socket "
                "(ssh -N -L ./docker.sock:/var/run/docker.sock HOST) and name that"
            )
        self._parts = parts

    async def call(self, work: Callable[[Any], T]) -> T:
        """What `work` gives for the SDK's low-level client.

        Waits for: the engine. Unblocked by: its answer, or the deadline of a call.

        Raises:
            EngineSilentError: it does not answer.
            EngineRefusedError: it answers with an error.
        """

        def carry_out() -> T:
            if self._client is None:
                self._client = docker.APIClient(
                    self.url, version="auto", timeout=self._deadline_s, max_pool_size=self._most_calls
                )
            return work(self._client)

        try:
            return await self._threads.call(carry_out)
        except docker.errors.APIError as error:
            raise EngineRefusedError(self.url, error.status_code or 0, str(error.explanation or error)) from error
        except TimeoutError as error:
            raise EngineSilentError(self.url, f"no answer within {self._deadline_s:g} s") from error
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            raise EngineSilentError(self.url, _cause_of(error)) from error

    async def remove(self, container: str) -> None:
        """Kill and remove a container; one that is gone is no error, and one that is going is waited for.

        Waits for: its end. Unblocked by: that, or the deadline of a call. Raises as `call` does.
        """
        try:
            await self.call(lambda api: api.remove_container(container, v=True, force=True))
            return
        except EngineRefusedError as error:
            if error.status == _NOT_FOUND:
                return
            if error.status != _CONFLICT:
                raise
        try:
            async with asyncio.timeout(self._deadline_s):
                while await self._has(container):
                    await asyncio.sleep(_REMOVAL_POLL_S)
        except TimeoutError as error:
            reason = f"container {container} was not removed within {self._deadline_s:g} s"
            raise EngineSilentError(self.url, reason) from error

    async def _has(self, container: str) -> bool:
        try:
            await self.call(lambda api: api.inspect_container(container))
        except EngineRefusedError as error:
            if error.status != _NOT_FOUND:
                raise
            return False
        return True

    async def open_stream(self, path: str, body: dict[str, Any]) -> EngineStream:
        """The streams that a POST to `path` opens. Raises as `call` does."""
        try:
            async with asyncio.timeout(self._deadline_s):
                reader, writer = await self._connect()
                try:
                    await self._upgrade(reader, writer, path, body)
                except BaseException:
                    writer.close()
                    raise
                return EngineStream(reader, writer)
        except TimeoutError as error:
            raise EngineSilentError(self.url, f"no answer within {self._deadline_s:g} s") from error
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise EngineSilentError(self.url, str(error)) from error

    def close(self) -> None:
        """End threads and connections."""
        self._threads.end()
        if self._client is not None:
            self._client.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._parts.scheme == "unix":
            return await asyncio.open_unix_connection(self._parts.path, limit=_BUFFER_BYTES)
        return await asyncio.open_connection(self._parts.hostname, self._parts.port, limit=_BUFFER_BYTES)

    async def _upgrade(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]
    ) -> None:
        data = json.dumps(body).encode()
        head = (
            f"POST /v{self._client.api_version}{path} HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status = int(answer.split(maxsplit=2)[1])
        if status not in _UPGRADED:
            said = (await reader.read(_MOST_HEAD_BYTES)).decode(errors="replace").strip()
            raise EngineRefusedError(self.url, status, said)


def _cause_of(error: BaseException) -> str:
    """What began a chain of errors: the SDK wraps a refused connection four times."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return str(error)
