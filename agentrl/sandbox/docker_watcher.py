"""What runs in a container, told and ended by its main process, which commands can neither signal nor write to.

The main process is a shell script under Docker's init, which takes up orphans. It is root of the container, with the
one right to send signals; it starts no program, so it can kill all others while they are at their limit of processes.
It reads the connection that the keeper has attached, and ends with it: so does the container, however the keeper ended.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

from agentrl.sandbox.docker_engine import EngineStream
from agentrl.types.errors import Boundary, EpisodeError

USER = "0:0"
"""User and group of the main process."""
RIGHTS = ("KILL",)
"""Capabilities that it needs. Commands have another user id, and get none of them."""
COMMAND = (
    "/bin/sh",
    "-c",
    """
while read -r question number; do
  if [ "$question" = kill ]; then kill -9 -1; fi
  killed=0
  for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    if [ -r $file ]; then
      while read -r key value; do if [ "$key" = oom_kill ]; then killed=$value; fi; done < $file
    fi
  done
  echo "$number $killed" /proc/[0-9]*
done 2>/dev/null
""",
)
"""The main process. It counts what the kernel killed for memory in either version of control groups."""
_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Sight:
    """Processes of a container beside its own two, by their ids inside, and how many were killed for memory so far.

    Example: ``Sight(frozenset({12, 13}), killed=0)``.
    """

    others: frozenset[int]
    killed: int


class Watcher:
    """Asks the main process of one container over the attached connection."""

    def __init__(self, stream: EngineStream) -> None:
        self._stream = stream
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Sight]] = {}
        self._own: frozenset[int] = frozenset()
        self._listening = asyncio.create_task(self._listen(), name="docker-watcher")

    async def begin(self) -> None:
        """Learn which processes are the container's own, before there are others. Raises as `look` does."""
        self._own = (await self.look()).others

    async def look(self) -> Sight:
        """What there is now.

        Waits for: an answer. Unblocked by: it, the end of the container, or a deadline.

        Raises:
            EpisodeError: boundary sandbox, kind lost: the container has ended, or does not answer.
        """
        return await self._ask("look")

    async def kill(self) -> Sight:
        """Kill all processes but the container's own, and tell what there is then. Waits and raises as `look` does."""
        return await self._ask("kill")

    async def close(self) -> None:
        """Drop the connection, upon which the container ends; safe to call twice."""
        self._stream.close()
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def _ask(self, question: str) -> Sight:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_ANSWER_S):
                if self._listening.done():
                    raise ConnectionResetError("its connection is gone")
                await self._stream.send(f"{question} {number}\n".encode())
                return await self._waiting[number]
        except (ConnectionError, TimeoutError) as error:
            reason = str(error) or f"no answer within {_ANSWER_S:g} s"
            raise EpisodeError(
                Boundary.SANDBOX, "lost", f"the container has ended, or its engine is gone: {reason}"
            ) from error
        finally:
            del self._waiting[number]

    async def _listen(self) -> None:
        rest = b""
        try:
            async for _, data in self._stream.frames():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(line.decode().split())
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionResetError("its connection is gone"))

    def _take(self, words: list[str]) -> None:
        number, killed, *paths = words
        waiting = self._waiting.get(int(number))
        if waiting is not None and not waiting.done():
            pids = frozenset(int(path.rpartition("/")[2]) for path in paths)
            waiting.set_result(Sight(pids - self._own, int(killed)))
