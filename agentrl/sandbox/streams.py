"""A program's three streams, carried between it and whoever runs it."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from agentrl.sandbox.backend import Output
from agentrl.types.errors import Boundary, EpisodeError

_CHUNK_BYTES = 1 << 16
ENTER = 'cd -- "$1" && shift && exec "$@"'
"""A shell's script that runs a command, behind its folder; it says 127 of a program that is not there, and 2 of such a
folder."""


async def start_program(
    arguments: Sequence[str], environment: Mapping[str, str], folder: str, **options: Any
) -> Process:
    """A program with pipes for its streams, in a session of its own; `options` are those of `subprocess.Popen`.

    Raises:
        EpisodeError: boundary sandbox, kind start: it cannot be, as with a null character among its arguments.
    """
    pipe = asyncio.subprocess.PIPE
    try:
        return await asyncio.create_subprocess_exec(
            *arguments,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            env=environment,
            cwd=folder,
            **options,
        )
    except (OSError, ValueError) as error:
        raise EpisodeError(Boundary.SANDBOX, "start", f"the command cannot be started: {error}") from error


async def carry(process: Process, stdin: AsyncIterator[bytes], output: Output) -> int:
    """Feed a program and take what it writes until it has ended; returns its exit code.

    Waits for: its end, and that of its outputs. Unblocked by: these; the caller sets the deadline and kills.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    feeding = asyncio.create_task(_feed(process.stdin, stdin), name="stdin")
    taking = [
        asyncio.create_task(_take(process.stdout, output.stdout), name="stdout"),
        asyncio.create_task(_take(process.stderr, output.stderr), name="stderr"),
    ]
    try:
        await asyncio.gather(*taking)
        code = await process.wait()
        # A program may leave the rest of what it is given; but what went wrong in giving it is not to be lost.
        if feeding.done():
            feeding.result()
        return code
    finally:
        for task in (feeding, *taking):
            task.cancel()
        await asyncio.gather(feeding, *taking, return_exceptions=True)


async def gone(process: Process) -> None:
    """Wait for a program that was killed, and let go what nobody reads any more: full pipes would hold up its end.

    Waits for: the end of the process and of all that has its outputs. Unblocked by: these, which the caller has killed.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    await asyncio.gather(process.wait(), _take(process.stdout, _let_go), _take(process.stderr, _let_go))


async def _let_go(data: bytes) -> None:
    pass


async def _feed(writer: asyncio.StreamWriter, chunks: AsyncIterator[bytes]) -> None:
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            async for chunk in chunks:
                writer.write(chunk)
                await writer.drain()
    finally:
        writer.close()


async def _take(reader: asyncio.StreamReader, give: Callable[[bytes], Awaitable[None]]) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        await give(chunk)


async def no_input() -> AsyncIterator[bytes]:
    """Input that has ended already."""
    nothing: tuple[bytes, ...] = ()
    for chunk in nothing:
        yield chunk
