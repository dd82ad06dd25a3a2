"""The loop that plays episodes: those of an earlier start, then new ones as they are admitted, until it parks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from agentrl.orchestration.assembly import RunParts
from agentrl.orchestration.shutdown import result_or_stopped
from agentrl.rollouts.journal import EpisodeParked
from agentrl.rollouts.session import session_key
from agentrl.types.episode import Ticket
from agentrl.types.version import PolicyVersion

_ABORT_INTERVAL_S = 0.5


class Production:
    """Plays all episodes of a run at once on one event loop.

    Once it `is_over` the run will not be resumed: an episode that is cut off then has its end on the ledger.
    """

    def __init__(self, parts: RunParts, version: Callable[[], PolicyVersion]) -> None:
        self._parts, self._version = parts, version
        self._parking, self._ended = asyncio.Event(), asyncio.Event()
        self.is_over = False

    async def run(self) -> None:
        """Go on with the episodes of an earlier start, then begin one whenever one is admitted.

        Waits for: the buffer's admission; once the run parks, for the episodes in flight. Unblocked by: places that
        come back; the episodes, each of which parks or ends; or cancellation at the end of the run, which ends all.
        """
        try:
            async with asyncio.TaskGroup() as episodes:
                for ticket in self._parts.journal.hand_over():
                    episodes.create_task(self._play(ticket), name=ticket.episode_id)
                while (admitted := await result_or_stopped(self._parts.buffer.admit(), self._parking)) is not None:
                    episodes.create_task(self._play(admitted), name=admitted.episode_id)
        finally:
            self._ended.set()

    def end(self) -> None:
        """The run is over."""
        self.is_over = True
        self._parts.journal.end()

    async def park(self) -> None:
        """Let all episodes stop where they are.

        Waits for: each to reach its next safe place; engines give back what they generate. Unblocked by: that, or
        the deadline of a call into an environment, after which what is not on record is cut off.
        """
        if not self._parts.journal.is_durable:
            return
        self._parts.observer.on_phase(f"parking {self._parts.buffer.num_running} episodes")
        self._parts.journal.park()
        self._parking.set()
        aborting = asyncio.create_task(self._abort_again_and_again())
        try:
            async with asyncio.timeout(self._parts.config.rollout.limits.tool_s):
                await self._ended.wait()
        except TimeoutError:
            self._parts.observer.on_phase("some episodes did not park in time; they go on from their last turn")
        finally:
            aborting.cancel()

    async def _abort_again_and_again(self) -> None:
        """A request may have been on its way to an engine that had just given all back. Ends by cancellation."""
        while True:
            for parts in self._parts.policies.values():
                await parts.serving.router.abort_all()
            await asyncio.sleep(_ABORT_INTERVAL_S)

    async def _play(self, ticket: Ticket) -> None:
        """Play one episode and settle it; cut off by the end of the run, it still reaches the ledger.

        Waits for: the episode. Unblocked by: its own deadline. A parked one is left as its journal has it.
        """
        parts = self._parts
        record = parts.runner.open(ticket)
        started = time.monotonic()
        try:
            episode = await parts.runner.run(record, lambda: parts.buffer.release(ticket))
        except EpisodeParked:
            return
        except asyncio.CancelledError:
            if self.is_over:
                cut_off = record.close(time.monotonic() - started)
                parts.buffer.ledger.dropped(cut_off, "run_ended", self._version().step)
            raise
        finally:
            for agent in record.agents:
                parts.policies[agent.policy].serving.router.end_session(session_key(ticket, agent.name))
        parts.recorder.record_episode(episode)
        await parts.buffer.settle(episode)
