"""Files in and out of a sandbox as streams, by programs that run in it.

The keeper never opens a path that a sandbox's commands could have made a link of: `cat` and `tar` do, inside.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from websockets.asyncio.server import ServerConnection

from agentrl.sandbox.backend import Exit
from agentrl.sandbox.streams import no_input
from agentrl.sandbox.table import KeptSandbox
from agentrl.sandbox.wire import Pack, Read, Unpack, Write
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.sandbox import WORKSPACE, Command

FILES_S = 120.0
_MOST_ERROR_BYTES = 1000
_WRITE = 'case "$1" in */*) mkdir -p -- "${1%/*}";; esac && cat > "$1"'
_READ = 'cat -- "$1"'
_UNPACK = 'mkdir -p -- "$1" && exec tar -x -o -f - -C "$1"'
_PACK = 'exec tar -c -f - -C "$1" .'


class Outgoing:
    """Sends what a program writes as frames, and keeps the beginning of its errors."""

    def __init__(self, connection: ServerConnection | None = None) -> None:
        self._connection = connection
        self.errors = bytearray()

    async def stdout(self, data: bytes) -> None:
        """The next bytes; waits for the client to have read."""
        if self._connection is not None and data:
            await self._connection.send(data)

    async def stderr(self, data: bytes) -> None:
        """The next bytes of errors."""
        self.errors.extend(data[: _MOST_ERROR_BYTES - len(self.errors)])


class Incoming:
    """The frames that a client sends, up to the empty one."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self._is_over = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while not self._is_over:
            frame = await self._connection.recv()
            self._is_over = not frame
            if frame:
                yield frame.encode() if isinstance(frame, str) else frame

    async def skip(self) -> None:
        """Read the rest, which nobody takes any more."""
        async for _ in self:
            pass


async def take_in(sandbox: Callable[[], KeptSandbox], call: Write | Unpack, connection: ServerConnection) -> None:
    """Write what a client sends. Raises EpisodeError behind the client's last frame."""
    incoming = Incoming(connection)
    try:
        program, target = (_WRITE, call.path) if isinstance(call, Write) else (_UNPACK, call.folder)
        await _run(sandbox(), program, target, aiter(incoming), Outgoing())
    finally:
        await incoming.skip()


async def read_out(sandbox: Callable[[], KeptSandbox], call: Read | Pack, connection: ServerConnection) -> None:
    """Send what a client reads, and the empty frame, whatever happens. Raises EpisodeError behind it."""
    try:
        program, target = (_READ, call.path) if isinstance(call, Read) else (_PACK, call.folder)
        await _run(sandbox(), program, target, no_input(), Outgoing(connection))
    finally:
        await connection.send(b"")


async def _run(kept: KeptSandbox, program: str, target: str, stdin: AsyncIterator[bytes], output: Outgoing) -> None:
    command = Command(("sh", "-c", program, "sh", target), timeout_s=FILES_S, folder=WORKSPACE)
    async with kept.lock:
        try:
            async with asyncio.timeout(FILES_S):
                ended = await kept.place.run(command, stdin, output)
        except TimeoutError:
            raise EpisodeError(Boundary.SANDBOX, "files", f"{target}: not done within {FILES_S:g} s") from None
    if ended != Exit(0):
        said = output.errors.decode(errors="replace").strip() or f"exit code {ended.code}"
        raise EpisodeError(Boundary.SANDBOX, "files", f"{target}: {said}")
