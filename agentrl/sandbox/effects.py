"""The effect log of one sandbox: every command by its id, with what became of it.

It is kept in the keeper's memory, out of reach of whatever runs in the sandbox, and for exactly as long as the sandbox
itself: a caller that died finds both or neither.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator

from agentrl.sandbox.backend import Place
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.sandbox import Command, CommandResult, Ended

_KILLED = 137


class Capture:
    """The beginnings of what a command writes; what is over the limit is counted and let go."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept = bytearray(), bytearray()
        self._sizes = [0, 0]

    async def stdout(self, data: bytes) -> None:
        """The next bytes of stdout."""
        self._take(0, data)

    async def stderr(self, data: bytes) -> None:
        """The next bytes of stderr."""
        self._take(1, data)

    def result(self, exit_code: int, seconds: float, ended: Ended) -> CommandResult:
        """The command's result with what was kept."""
        (out, err), (out_bytes, err_bytes) = self._kept, self._sizes
        return CommandResult(exit_code, bytes(out), bytes(err), out_bytes, err_bytes, seconds, ended)

    def _take(self, stream: int, data: bytes) -> None:
        self._sizes[stream] += len(data)
        self._kept[stream].extend(data[: max(0, self._most_bytes - len(self._kept[stream]))])


class EffectLog:
    """Runs the commands of a place, one at a time, each at most once."""

    def __init__(self, place: Place, lock: asyncio.Lock, counts: Counter[str]) -> None:
        """Whoever else uses the place holds `lock` meanwhile; commands and how they ended go into `counts`."""
        self._place, self._lock, self._counts = place, lock, counts
        self._effects: dict[str, asyncio.Task[CommandResult]] = {}
        self._stops: dict[str, asyncio.Timeout] = {}
        self._stopped: set[str] = set()

    async def run(self, effect_id: str, command: Command) -> CommandResult:
        """What the command gives, or gave when it was begun under this id; goes on when its caller is gone.

        Waits for: the command, and those before it. Unblocked by: its end or its deadline.
        """
        if effect_id not in self._effects:
            self._effects[effect_id] = asyncio.create_task(self._run(effect_id, command), name=f"effect-{effect_id}")
        return await _result(self._effects[effect_id])

    async def outcome(self, effect_id: str) -> CommandResult | None:
        """What became of an effect, None if it was never begun. Waits and is unblocked as `run`."""
        known = self._effects.get(effect_id)
        return None if known is None else await _result(known)

    async def stop(self, effect_id: str) -> None:
        """End a command as its deadline would, also one that waits for others; one that was never begun will not be.

        Waits for: its end. Unblocked by: that, since it is killed.
        """
        if effect_id in self._stops and effect_id not in self._stopped:
            self._stops[effect_id].reschedule(asyncio.get_running_loop().time())
        self._stopped.add(effect_id)
        if effect_id in self._effects:
            await asyncio.wait({self._effects[effect_id]})

    async def end(self) -> None:
        """Kill what runs."""
        running = [task for task in self._effects.values() if not task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, effect_id: str, command: Command) -> CommandResult:
        output, begun = Capture(command.max_output_bytes), time.monotonic()
        if effect_id not in self._stopped:
            try:
                async with asyncio.timeout(None) as self._stops[effect_id], self._lock:
                    begun = time.monotonic()
                    return await self._carry_out(command, output, begun)
            except TimeoutError:  # by `stop`, which sets the deadline
                pass
            finally:
                del self._stops[effect_id]
        self._counts["stopped"] += 1
        return output.result(_KILLED, time.monotonic() - begun, Ended.STOPPED)

    async def _carry_out(self, command: Command, output: Capture, begun: float) -> CommandResult:
        self._counts["commands"] += 1
        try:
            async with asyncio.timeout(command.timeout_s):
                ended = await self._place.run(command, _whole(command.stdin), output)
        except TimeoutError:
            self._counts["timeouts"] += 1
            return output.result(_KILLED, time.monotonic() - begun, Ended.TIMEOUT)
        self._counts["out_of_memory"] += ended.is_out_of_memory
        how = Ended.MEMORY if ended.is_out_of_memory else Ended.EXITED
        return output.result(ended.code, time.monotonic() - begun, how)


async def _result(effect: asyncio.Task[CommandResult]) -> CommandResult:
    """Of an effect, which goes on when whoever waits is cancelled. Raises EpisodeError if the sandbox was ended."""
    try:
        return await asyncio.shield(effect)
    except asyncio.CancelledError:
        if not effect.cancelled():
            raise
        raise EpisodeError(Boundary.SANDBOX, "lost", "the sandbox was ended while a command ran") from None


async def _whole(data: bytes) -> AsyncIterator[bytes]:
    if data:
        yield data
