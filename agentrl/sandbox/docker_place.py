"""One container as a sandbox: commands as execs, ended to the last process.

A command runs under a shell that, when the command has ended, kills all that its user id has left running: an engine
waits two seconds for a detached child that holds the command's pipes. An agent can kill or stop that shell, whose user
id it has. So before a result is told, the container's main process, which it cannot reach, is asked whether anything
still runs, and ends it. A container in which that fails is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from agentrl.sandbox.backend import Exit, Output
from agentrl.sandbox.docker_engine import STDERR, DockerEngine, EngineRefusedError, EngineStream
from agentrl.sandbox.docker_snapshots import SnapshotStore
from agentrl.sandbox.docker_watcher import Sight, Watcher
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.sandbox import Command

# Its own stderr is nowhere, so that it does not report signals there. `exec` in a subshell never runs a builtin.
_RUN = """
cd -- "$1" >/dev/null || exit 126
shift
exec 3>&2 2>/dev/null
(exec "$@" 2>&3 3>&-)
code=$?
kill -9 -1
exit $code
"""
# What runc says in place of a command's output when it could not start it.
_NOT_STARTED = b"OCI runtime exec failed"
_KILLED = 137
_MOST_WORD_BYTES = 1 << 17  # of an argument or a variable, with its end
_POLL_S = 2.0
_KILL_S = 30.0
_AGAIN_S = 0.05
_ENDED_S = 60.0
_PAUSES_S = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032)
_log = logging.getLogger(__name__)


class DockerPlace:
    """A container that runs. `release` is called when it is gone, and its place on the engine is free again."""

    def __init__(
        self,
        engine: DockerEngine,
        name: str,
        watcher: Watcher,
        user: str,
        snapshots: SnapshotStore,
        most_snapshot_bytes: int,
        release: Callable[[DockerPlace], None],
    ) -> None:
        self._engine, self._name, self._watcher, self._user = engine, name, watcher, user
        self._snapshots, self._most_snapshot_bytes, self._release = snapshots, most_snapshot_bytes, release
        self._lock = asyncio.Lock()
        self._lost: str | None = None
        self._clearing: asyncio.Task[Sight | None] | None = None

    async def run(self, command: Command, stdin: AsyncIterator[bytes], output: Output) -> Exit:
        """Run a command by an exec. Its exit code is 126 if its folder is not there."""
        async with self._lock:
            if self._clearing is not None:
                await asyncio.shield(self._clearing)
            if self._lost is not None:
                raise EpisodeError(Boundary.SANDBOX, "lost", self._lost)
            _check_arguments(command)
            killed_before = (await self._watcher.look()).killed
            exec_id = await self._create_exec(command)
            try:
                return await self._carry_out(exec_id, stdin, output, killed_before)
            except BaseException:
                # A second cancellation leaves this task behind; the next command waits for it.
                self._clearing = asyncio.create_task(self._clear(exec_id), name=f"clear-{self._name}")
                await asyncio.shield(self._clearing)
                raise

    async def snapshot(self, name: str) -> None:
        """Keep the workspace as an archive; the rest of the files cannot be written or is temporary."""
        await self._snapshots.keep(name, self.run, self._most_snapshot_bytes)

    async def close(self) -> None:
        """Remove the container."""
        await self._remove("it has been closed")

    async def _create_exec(self, command: Command) -> str:
        arguments = ["/bin/sh", "-c", _RUN, "sh", command.folder, *command.arguments]
        try:
            made: dict[str, str] = await self._engine.call(
                lambda api: api.exec_create(
                    self._name, arguments, user=self._user, stdin=True, environment=dict(command.environment)
                )
            )
        except EngineRefusedError as error:
            raise self._is_gone(error) from error
        return made["Id"]

    async def _carry_out(self, exec_id: str, stdin: AsyncIterator[bytes], output: Output, killed_before: int) -> Exit:
        stream = await self._start(exec_id)
        feeding = asyncio.create_task(_feed(stream, stdin), name="stdin")
        taking = asyncio.create_task(_take(stream, output), name="output")
        try:
            await self._wait_for_output(exec_id, taking)
            held = taking.result()
            if feeding.done():
                feeding.result()
        finally:
            for task in (feeding, taking):
                task.cancel()
            await asyncio.gather(feeding, taking, return_exceptions=True)
            stream.close()
        state = await self._ended_exec(exec_id)
        is_out_of_memory = (await self._clear_leftovers(exec_id)).killed > killed_before
        if held and state["Pid"]:
            await output.stdout(held)
        elif held and is_out_of_memory:  # files fill the memory, so that runc itself was killed
            return Exit(_KILLED, is_out_of_memory)
        elif held:
            said = held.decode(errors="replace").strip()
            raise EpisodeError(Boundary.SANDBOX, "start", f"the command cannot be started: {said}")
        return Exit(state["ExitCode"], is_out_of_memory)

    async def _start(self, exec_id: str) -> EngineStream:
        """Start an exec. When cancelled, it waits for the start: an exec that may start later would outlive its end."""
        opening = asyncio.create_task(
            self._engine.open_stream(f"/exec/{exec_id}/start", {"Detach": False, "Tty": False}), name="exec"
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait({opening})
            if opening.exception() is None:
                opening.result().close()
            raise

    async def _wait_for_output(self, exec_id: str, taking: asyncio.Task[bytes]) -> None:
        """Waits for: the end of the command's outputs. Unblocked by: that; the caller has the deadline.

        Where the command has ended and something holds its outputs open, that is killed.
        """
        while not (await asyncio.wait({taking}, timeout=_POLL_S))[0]:
            if (await self._inspect(exec_id))["ExitCode"] is not None:
                await self._watcher.kill()

    async def _ended_exec(self, exec_id: str) -> dict[str, Any]:
        """What the engine knows of an exec whose outputs have ended. Raises EpisodeError."""
        pauses = iter(_PAUSES_S)
        try:
            async with asyncio.timeout(_ENDED_S):
                while (state := await self._inspect(exec_id))["ExitCode"] is None:
                    await asyncio.sleep(next(pauses, _AGAIN_S))
                return state
        except TimeoutError as error:
            message = f"the engine at {self._engine.url} does not tell the end of a command of container {self._name}"
            raise EpisodeError(Boundary.SANDBOX, "lost", message) from error

    async def _inspect(self, exec_id: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = await self._engine.call(lambda api: api.exec_inspect(exec_id))
        except EngineRefusedError as error:
            raise self._is_gone(error) from error
        return found

    async def _clear_leftovers(self, exec_id: str) -> Sight:
        """See to it that nothing runs any more. Raises EpisodeError (kind lost) if the container had to be removed."""
        sight = await self._watcher.look()
        for pause in _PAUSES_S:  # what has been killed takes a moment to go
            if not sight.others:
                return sight
            await asyncio.sleep(pause)
            sight = await self._watcher.look()
        cleared = await self._clear(exec_id) if sight.others else sight
        if cleared is None:
            raise EpisodeError(Boundary.SANDBOX, "lost", self._lost or "")
        return cleared

    async def _clear(self, exec_id: str) -> Sight | None:
        """Kill all but the container's own, and the exec if it is yet to start; None if the container is gone.

        Waits for: their end. Unblocked by: that, or `_KILL_S`, after which the container is removed.
        """
        try:
            async with asyncio.timeout(_KILL_S):
                sight = await self._watcher.kill()
                while sight.others or (await self._inspect(exec_id))["ExitCode"] is None:
                    await asyncio.sleep(_AGAIN_S)
                    sight = await self._watcher.kill()
                return sight
        except (TimeoutError, EpisodeError) as error:
            reason = str(error) or f"not within {_KILL_S:g} s"
            await self._remove(f"container {self._name} was removed, its processes could not be ended: {reason}")
            return None

    def _is_gone(self, error: EngineRefusedError) -> EpisodeError:
        return EpisodeError(Boundary.SANDBOX, "lost", f"container {self._name} is gone: {error.reason}")

    async def _remove(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
        try:
            await self._engine.remove(self._name)
        except EpisodeError as error:
            _log.warning("container %s could not be removed, it ends by itself: %s", self._name, error)
        finally:
            await self._watcher.close()
            self._release(self)


def _check_arguments(command: Command) -> None:
    """Raises EpisodeError for what no kernel takes, and what an engine would report as if the command had said it."""
    words = (*command.arguments, *(f"{name}={value}" for name, value in command.environment.items()), command.folder)
    for word in words:
        if "\0" in word or len(word.encode()) >= _MOST_WORD_BYTES:
            reason = f"{word[:40]!r} has a null character, or is longer than a kernel takes"
            raise EpisodeError(Boundary.SANDBOX, "start", f"the command cannot be started: {reason}")


async def _feed(stream: EngineStream, chunks: AsyncIterator[bytes]) -> None:
    try:
        with contextlib.suppress(ConnectionError):
            async for chunk in chunks:
                await stream.send(chunk)
    finally:
        stream.end_input()


async def _take(stream: EngineStream, output: Output) -> bytes:
    """Hand on what a command writes. What may be the engine's word that it could not start is returned instead."""
    held, is_first = b"", True
    async for number, data in stream.frames():
        if held:
            await output.stdout(held)
            held = b""
        if is_first and data.startswith(_NOT_STARTED):
            held = data
        else:
            await (output.stderr(data) if number == STDERR else output.stdout(data))
        is_first = False
    return held
