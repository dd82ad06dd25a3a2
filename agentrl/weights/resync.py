"""Brings engines that were set aside back, in the background, until each has a receipt again."""

from __future__ import annotations

import asyncio
from collections import Counter

from agentrl.inference.fleet import EngineState, Fleet
from agentrl.types.batch import Receipt
from agentrl.types.errors import EngineError, PublishError
from agentrl.weights.publisher import StagedPublisher

_FIRST_DELAY_S = 0.25
_LONGEST_DELAY_S = 30.0
_HOPELESS_FAILURES = 4


class Resynchronizer:
    """Tries again what a publication could not do, ever more slowly, engine by engine.

    Healthy engines never wait for it. When every engine of the fleet has failed several times running,
    the fault is not the engines', and it gives up. An engine that does not even answer has not failed: whoever watches
    the fleet waits for it to come back.
    """

    def __init__(self, fleet: Fleet, publisher: StagedPublisher) -> None:
        self._fleet, self._publisher = fleet, publisher
        self._failures: Counter[str] = Counter()
        self._busy: set[str] = set()

    async def run(self) -> None:
        """Take care of every engine that becomes stale.

        Waits for: a change of the fleet. Unblocked by: it, or cancellation.

        Raises:
            PublishError: no engine takes the newest weights; names phase and engine of each.
            StorageError: the newest weights are damaged.
            EngineTakenError: an engine belongs to another run.
        """
        async with asyncio.TaskGroup() as tries:
            while True:
                idle = [name for name in self._fleet.stale if name not in self._busy]
                self._busy.update(idle)
                for name in idle:
                    tries.create_task(self._bring_back(name), name=f"resync-{name}")
                await self._fleet.wait_for_change()

    async def _bring_back(self, name: str) -> None:
        """Waits for: a receipt. Unblocked by: it, the engine's death, or the fleet's hopelessness."""
        delay_s = _FIRST_DELAY_S
        try:
            while self._fleet.members[name].state is EngineState.STALE:
                if isinstance(await self._publisher.sync(name), Receipt):
                    self._failures.pop(name, None)
                    self._publisher.counts.resyncs += 1
                    return
                if await self._answers(name):
                    self._failures[name] += 1
                    self._check_hope()
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        finally:
            self._busy.discard(name)

    async def _answers(self, name: str) -> bool:
        try:
            await self._fleet.members[name].engine.ping()
        except EngineError:
            return False
        return True

    def _check_hope(self) -> None:
        lost = [n for n, m in self._fleet.members.items() if m.state is EngineState.DEAD]
        failing = [name for name, count in self._failures.items() if count >= _HOPELESS_FAILURES]
        if not self._fleet.healthy and failing and len({*lost, *failing}) == len(self._fleet.members):
            raise PublishError(self._publisher.describe_failure())
