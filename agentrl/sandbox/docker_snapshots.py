"""The workspaces of snapshots, kept by the keeper as archives without a name on disk.

`docker commit` sees nothing of them: all that a sandbox can write lies in memory file systems. An archive can be put
into a sandbox on any host, and is gone with the keeper, however that ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from io import FileIO

from agentrl.sandbox.backend import Exit, Output
from agentrl.sandbox.docker_engine import CallThreads
from agentrl.sandbox.streams import no_input
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.sandbox import WORKSPACE, Command

Run = Callable[[Command, AsyncIterator[bytes], Output], Awaitable[Exit]]
_CHUNK_BYTES = 1 << 18
_DISK_S = 120.0
_MOST_ERROR_BYTES = 1000
# Programs of the image, wherever the task's own PATH leads.
_PATH = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_PACK = Command(("tar", "-c", "-f", "-", "-C", WORKSPACE, "."), environment=_PATH)
_UNPACK = Command(("tar", "-x", "-p", "-f", "-", "-C", WORKSPACE), environment=_PATH)


class SnapshotStore:
    """Archives by the names of snapshots."""

    def __init__(self) -> None:
        self._files: dict[str, FileIO] = {}
        self._threads = CallThreads("snapshots", _DISK_S)

    async def keep(self, name: str, run: Run, most_bytes: int) -> None:
        """Keep what the workspace has, if that is not more than `most_bytes`: files with holes may seem endless.

        Raises:
            EpisodeError: boundary sandbox, kind snapshot: it is larger, cannot be read, or cannot be written here.
        """
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - it lives until it is forgotten
        sink = _Archive(file, self._threads, most_bytes)
        try:
            _check(name, await run(_PACK, no_input(), sink), sink)
        except OSError as error:
            file.close()
            raise EpisodeError(Boundary.SANDBOX, "snapshot", f"{name} cannot be written here: {error}") from error
        except BaseException:
            file.close()
            raise
        self.forget(name)
        self._files[name] = file

    async def restore(self, name: str, run: Run) -> None:
        """Fill an empty workspace. Raises EpisodeError (boundary sandbox, kind snapshot)."""
        file = self._files.get(name)
        if file is None:
            raise EpisodeError(Boundary.SANDBOX, "snapshot", f"no snapshot {name} is kept")
        # A descriptor of its own: what is forgotten meanwhile is read to its end.
        descriptor, sink = os.dup(file.fileno()), _Complaints()
        try:
            _check(name, await run(_UNPACK, self._chunks(descriptor), sink), sink)
        finally:
            os.close(descriptor)

    def forget(self, name: str) -> None:
        """Remove a snapshot; one that is gone already is no error."""
        file = self._files.pop(name, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Remove all."""
        for name in list(self._files):
            self.forget(name)
        self._threads.end()

    async def _chunks(self, descriptor: int) -> AsyncIterator[bytes]:
        """The content of a file; several may read it at once."""
        offset = 0
        while chunk := await self._threads.call(partial(os.pread, descriptor, _CHUNK_BYTES, offset)):
            offset += len(chunk)
            yield chunk


class _Complaints:
    """Keeps the beginning of what `tar` complains of."""

    def __init__(self) -> None:
        self.errors = bytearray()

    async def stdout(self, data: bytes) -> None:
        """Nothing is expected here."""

    async def stderr(self, data: bytes) -> None:
        self.errors += data[: _MOST_ERROR_BYTES - len(self.errors)]


class _Archive(_Complaints):
    """Takes an archive into a file."""

    def __init__(self, file: FileIO, threads: CallThreads, most_bytes: int) -> None:
        super().__init__()
        self._file, self._threads, self._left_bytes = file, threads, most_bytes

    async def stdout(self, data: bytes) -> None:
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise EpisodeError(Boundary.SANDBOX, "snapshot", "the workspace is larger than a snapshot may be")
        await self._threads.call(partial(self._file.write, data))


def _check(name: str, ended: Exit, sink: _Complaints) -> None:
    if ended != Exit(0):
        said = sink.errors.decode(errors="replace").strip() or f"exit code {ended.code}"
        raise EpisodeError(Boundary.SANDBOX, "snapshot", f"{name}: {said}")
