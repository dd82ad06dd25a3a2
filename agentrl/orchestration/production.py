"""The loop that plays episodes: those of an earlier start, then new ones as they are admitted, until it parks."""

from __future__ import annotations

import asyncio
import logging

from agentrl.journal.forking import has_pinned
from agentrl.orchestration.assembly import RunParts
from agentrl.orchestration.shutdown import result_or_stopped
from agentrl.rollouts.environment_recovery import end_session
from agentrl.rollouts.episode_log import EpisodeParked
from agentrl.telemetry.spans import SpanKind
from agentrl.types.episode import Episode, Ticket
from agentrl.types.rollout import PackedEntry

_GIVE_BACK_S = 3.0
_log = logging.getLogger(__name__)


class Production:
    """Has all episodes of a run played at once by its workers.

    Once it `is_over` the run will not be resumed: what is cut off then is at its end.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._parking, self._ended = asyncio.Event(), asyncio.Event()
        self.is_over = False
        self.cut_off: dict[str, Episode] = {}
        """Episodes that the end of the run cut off, as they stood then."""

    async def run(self) -> None:
        """Go on with the episodes of an earlier start, then begin one whenever one is admitted.

        Waits for: the buffer's admission; once the run parks, for the episodes in flight. Unblocked by: places that
        come back; the episodes, each of which parks or ends; or cancellation at the end of the run, which ends all.
        """
        try:
            async with self._parts.pool.running(), asyncio.TaskGroup() as episodes:
                running, unscored = self._parts.journal.hand_over()
                for ticket, entries in running:
                    episodes.create_task(self._play(ticket, entries), name=ticket.episode_id)
                for episode in unscored:
                    self._parts.traces.begin(episode.episode_id)
                    episodes.create_task(self._settle(episode), name=f"score-{episode.episode_id}")
                while (admitted := await result_or_stopped(self._admit(), self._parking)) is not None:
                    episodes.create_task(self._play(admitted), name=admitted.episode_id)
        finally:
            if self.is_over:
                await self._end_sessions()
            self._ended.set()

    async def _admit(self) -> Ticket:
        """Leave to start an episode. Waits for: scorers that lag far behind, then the buffer. Unblocked by: these."""
        await self._parts.scoring.room()
        return await self._parts.buffer.admit()

    def end(self) -> None:
        """The run is over."""
        self.is_over = True
        self._parts.pool.end()

    async def park(self) -> None:
        """Let all episodes stop where they are.

        Waits for: each to reach its next safe place; engines give back what they generate. Unblocked by: that, or
        the deadline of a call into an environment, after which what is not on record is cut off.
        """
        if not self._parts.journal.is_durable:
            return
        self._parts.observer.on_phase(f"parking {self._parts.buffer.num_running} episodes")
        self._parts.pool.park()
        self._parking.set()
        routers = [parts.serving.router for parts in self._parts.policies.values()]
        if num_lost := sum(await asyncio.gather(*(router.give_back(_GIVE_BACK_S) for router in routers))):
            text = f"{num_lost} replies were not given back in time; they go on from what is on record"
            self._parts.observer.on_phase(text)
        try:
            config = self._parts.config
            async with asyncio.timeout(max(config.limits_of(name).tool_s for name in config.environments)):
                await self._ended.wait()
        except TimeoutError:
            self._parts.observer.on_phase("some episodes did not park in time; they go on from their last turn")

    async def _play(self, ticket: Ticket, entries: tuple[PackedEntry, ...] = ()) -> None:
        """Play one episode and settle it, or keep it as it is when the end of the run cuts it off.

        A fork goes on from what its parent has on record.

        Waits for: the episode. Unblocked by: its own deadline. A parked one is left as its journal has it.
        """
        parts = self._parts
        parts.traces.begin(ticket.episode_id)
        try:
            if ticket.fork is not None and not has_pinned(entries):
                entries = await parts.journal.workers.pin(ticket)
            episode = await parts.pool.play(ticket, entries, lambda: parts.buffer.release(ticket))
        except EpisodeParked:
            parts.traces.end(ticket.episode_id, outcome="parked")
            return
        except asyncio.CancelledError:
            parts.traces.end(ticket.episode_id, outcome="cut_off")
            if self.is_over:
                self.cut_off[ticket.episode_id] = await parts.pool.cut_off(ticket)
            raise
        parts.journal.sessions.pop(ticket.episode_id, None)
        await self._settle(episode)

    async def _end_sessions(self) -> None:
        """End the live sessions of episodes that an earlier start began and nobody will go on with.

        Waits for: their environments, one after the other. Unblocked by: these, or the deadline of a call into the
        slowest, after which those that are left are told of.
        """
        parts = self._parts
        sessions = list(parts.journal.sessions.values())
        try:
            async with asyncio.timeout(max(parts.config.limits_of(name).tool_s for name in parts.config.environments)):
                while sessions:
                    ticket, token = sessions[-1].ticket, parts.journal.workers.next_token()
                    await end_session(parts.hosts[ticket.environment], ticket.task, sessions[-1].handle, token)
                    sessions.pop()
        except TimeoutError:
            handles = ", ".join(session.handle for session in sessions)
            _log.warning("these live sessions were not ended in time: %s; end them where they live", handles)

    async def _settle(self, episode: Episode) -> None:
        """Have an episode that was played judged, and hand it to the buffer; a run that parks leaves that to the next.

        Waits for: its scorers; those that only record come behind. Unblocked by: their ends, or parking.
        """
        name, traces = episode.episode_id, self._parts.traces
        with traces.of(name).during(SpanKind.SCORING, "score"):
            scored = await result_or_stopped(self._parts.scoring.complete(episode), self._parking)
        if scored is None:
            traces.end(name, outcome="parked")
            return
        reward = {"reward": scored.reward} if scored.reward is not None else {}
        traces.end(name, outcome=scored.outcome, turns=len(scored.turns), task=scored.ticket.task.id, **reward)
        self._parts.recorder.record_episode(scored)
        await self._parts.buffer.settle(scored)
        await result_or_stopped(self._parts.scoring.add_recorded(scored), self._parking)
