"""Watches a fleet: probes that tell a slow engine from a dead one, restarts, and the end of hope."""

from __future__ import annotations

import asyncio
import logging

from agentrl.inference.config import FleetConfig
from agentrl.inference.fleet import EngineState, Fleet, Member
from agentrl.protocols import Runtime
from agentrl.types.errors import EngineError, EngineRestartedError, EnginesLostError

_log = logging.getLogger(__name__)


class FleetSupervisor:
    """Moves engines to SUSPECT and DEAD, and brings dead ones back.

    An engine whose process ends is dead at once; one that does not answer for `suspect_s` gets no new
    requests, and after `dead_s` counts as dead. What comes back holds old weights: it is STALE until the
    publisher has its receipt.
    """

    def __init__(self, fleet: Fleet, runtime: Runtime, config: FleetConfig) -> None:
        self._fleet, self._runtime, self._config = fleet, runtime, config

    async def run(self) -> None:
        """Watch every engine, and those that join.

        Waits for: probes and the ends of processes. Unblocked by: cancellation, or the death of the last
        engine that can come back.

        Raises:
            EnginesLostError: no engine is left; says why of each.
            EngineTakenError: one belongs to another run.
        """
        async with asyncio.TaskGroup() as watches:
            watched: set[str] = set()
            while True:
                for name in self._fleet.members.keys() - watched:
                    watches.create_task(self._watch(name), name=f"watch-{name}")
                    watched.add(name)
                await self._fleet.wait_for_change()

    async def _watch(self, name: str) -> None:
        """Waits for: one engine's death, then its return. Unblocked by: `_revive` giving up."""
        while True:
            reason = await self._until_dead(name)
            self._fleet.dead(name, reason)
            try:
                engine = await self._runtime.revive_engine(name)
            except EngineError as error:
                self._fleet.dead(name, f"{reason}; {error}")
                break
            self._fleet.restarted(name, engine)
        if all(member.state is EngineState.DEAD for member in self._fleet.members.values()):
            raise EnginesLostError(f"no engine is left: {self._fleet.describe()}\nResume the run to start them again")

    async def _until_dead(self, name: str) -> str:
        """Why the engine is dead, once it is."""
        ended = asyncio.create_task(self._runtime.engine_ended(name))
        silent = asyncio.create_task(self._until_silent(self._fleet.members[name]))
        try:
            await asyncio.wait({ended, silent}, return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else silent.result()
        finally:
            ended.cancel()
            silent.cancel()

    async def _until_silent(self, member: Member) -> str:
        """Look at the engine at intervals, until it has not answered for `dead_s`."""
        loop = asyncio.get_running_loop()
        answered = loop.time()
        while True:
            await asyncio.sleep(self._config.probe_s)
            try:
                async with asyncio.timeout(self._config.suspect_s):
                    await self._look_at(member)
            except EngineRestartedError as error:
                return str(error)
            except (EngineError, TimeoutError) as error:
                reason = str(error) or f"no answer to a probe within {self._config.suspect_s:g} s"
                self._fleet.suspect(member.name, reason)
                if loop.time() - answered >= self._config.dead_s:
                    return f"no answer for {self._config.dead_s:g} s: {reason}"
                continue
            answered = loop.time()

    async def _look_at(self, member: Member) -> None:
        """Ask whether it is well, or only whether it is there while somebody changes its weights.

        A suspect is told to generate first: a pause whose answer was lost may have reached it late.
        """
        if member.update_lock.locked():
            return await member.engine.ping()
        if member.state is EngineState.SUSPECT:
            async with member.update_lock:
                await member.engine.resume()
        served = member.served
        try:
            version = await member.engine.probe()
        except EngineError:
            if member.update_lock.locked() or member.served is not served:
                return None  # it was paused for new weights meanwhile
            raise
        if member.update_lock.locked():
            return None
        if version == member.version:
            self._fleet.clear_suspicion(member.name)
        elif member.state in (EngineState.HEALTHY, EngineState.SUSPECT):
            self._fleet.set_aside(member.name, f"serves version {version} instead of {member.version}")
        return None
