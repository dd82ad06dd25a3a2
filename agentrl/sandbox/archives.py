"""Tar archives: made of files for a sandbox, and read as data where a sandbox made them.

What a sandbox packs is as hostile as what runs in it. Nothing of it is ever unpacked here: only the bytes of regular
files are read, up to a limit, by the names that the archive gives them.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator, Iterator, Mapping

from agentrl.protocols import Sandbox
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.sandbox import WORKSPACE


async def write_file(sandbox: Sandbox, path: str, data: bytes) -> None:
    """Write a whole file. Raises EpisodeError (boundary sandbox, kind files)."""
    await sandbox.write(path, _pieces(data))


async def read_file(sandbox: Sandbox, path: str, max_bytes: int) -> bytes:
    """A whole file. Raises EpisodeError (boundary sandbox, kind files), also if it is over `max_bytes`."""
    return await _bounded(sandbox.read(path), path, max_bytes)


async def write_files(sandbox: Sandbox, files: Mapping[str, bytes], folder: str = WORKSPACE) -> None:
    """Write files by their paths below a folder, by one command. Raises EpisodeError (boundary sandbox, kind files)."""
    await sandbox.unpack(_pieces(archive_of(files)), folder)


async def files_of(sandbox: Sandbox, folder: str, max_bytes: int) -> dict[str, bytes]:
    """The regular files below a folder, by their paths in it; links, devices and names that climb out are left out.

    Raises:
        EpisodeError: boundary sandbox, kind files: the folder is not there, or is over `max_bytes` with its names.
    """
    archive = await _bounded(sandbox.pack(folder), folder, max_bytes)
    return regular_files(archive)


def archive_of(files: Mapping[str, bytes]) -> bytes:
    """A tar archive of files by their paths."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def regular_files(archive: bytes) -> dict[str, bytes]:
    """The regular files of an archive by their paths in it. Raises EpisodeError if it is none."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
            return dict(_contents(opened))
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:
        raise EpisodeError(Boundary.SANDBOX, "files", f"what the sandbox packed is no archive: {error}") from error


def _contents(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for entry in archive:
        path = entry.name.removeprefix("./")
        # A sparse file can claim any size, whatever the archive holds.
        content = archive.extractfile(entry) if entry.isreg() and not entry.issparse() else None
        if content is not None and _is_below(path):
            yield path, content.read()


def _is_below(path: str) -> bool:
    return not path.startswith("/") and ".." not in path.split("/")


async def _bounded(content: AsyncIterator[bytes], what: str, max_bytes: int) -> bytes:
    data = bytearray()
    async for chunk in content:
        data += chunk
        if len(data) > max_bytes:
            raise EpisodeError(Boundary.SANDBOX, "files", f"{what} is over {max_bytes} bytes")
    return bytes(data)


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1 << 16):
        yield data[start : start + (1 << 16)]
