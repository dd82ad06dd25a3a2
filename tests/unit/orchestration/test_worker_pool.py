"""Hand-overs, with workers that a test drives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from agentrl.journal.claim import Claim
from agentrl.journal.entries import Ended, EnvironmentStarted, Leased, Scored, pack
from agentrl.journal.holder import unpack_history
from agentrl.journal.writer import JournalWriter
from agentrl.orchestration.worker_journals import WorkerJournals
from agentrl.orchestration.worker_pool import WorkerPool
from agentrl.protocols import RolloutWorker
from agentrl.rollouts.durable import WorkerJournal
from agentrl.rollouts.episode_log import EpisodeParked
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.types.environment import Opening, Score, ScoreRecord
from agentrl.types.episode import Episode, StopReason
from agentrl.types.errors import StorageError, WorkerLostError
from agentrl.types.message import Message, Role
from agentrl.types.rollout import Assignment, EpisodeFinished, EpisodeLeft, PlaceFreed, WorkerEvent, WorkerFailed


@dataclass
class DrivenWorker(RolloutWorker):
    """Tells what a test puts into `events`."""

    name: str
    node: str
    events: asyncio.Queue[WorkerEvent | WorkerLostError] = field(default_factory=asyncio.Queue)
    assigned: list[Assignment] = field(default_factory=list)
    has_more: asyncio.Event = field(default_factory=asyncio.Event)

    async def assign(self, assignment: Assignment) -> None:
        self.assigned.append(assignment)
        self.has_more.set()

    async def next_event(self) -> WorkerEvent:
        event = await self.events.get()
        if isinstance(event, WorkerLostError):
            raise event
        return event

    def park(self) -> None:
        for assignment in self.assigned:
            self.events.put_nowait(EpisodeLeft(assignment.ticket.episode_id, assignment.token))

    def end(self) -> None:
        return

    async def cut_off(self, episode_id: str) -> Episode | None:
        return None

    async def close(self) -> None:
        return

    async def has(self, count: int) -> None:
        """Waits for so many assignments."""
        while len(self.assigned) < count:
            self.has_more.clear()
            await self.has_more.wait()


@dataclass
class Run:
    """A pool, and the workers that it started in order."""

    pool: WorkerPool
    started: list[DrivenWorker]
    released: list[str]
    may_start: asyncio.Event
    failures: list[WorkerLostError]

    def play(self, name: str) -> asyncio.Task[Episode]:
        async def release() -> None:
            self.released.append(name)

        return asyncio.create_task(self.pool.play(build_ticket(name), (), release))

    def lose(self, worker: DrivenWorker, running: str | None = None) -> None:
        worker.events.put_nowait(WorkerLostError("crashed", f"{worker.name}: signal 9", running))


@asynccontextmanager
async def run(folder: Path, num_workers: int, max_losses: int = 2) -> AsyncIterator[Run]:
    claim, started = Claim.take(folder), []
    may_start, failures = asyncio.Event(), []
    may_start.set()
    own = WorkerJournal(JournalWriter(folder, "worker-0"))
    journals = WorkerJournals(claim, own)

    async def start(place: int) -> RolloutWorker:
        await may_start.wait()
        if failures:
            may_start.clear()
            raise failures.pop()
        started.append(DrivenWorker(f"worker-{place + 1}", f"node-{place}"))
        journals.begin(started[-1].name)
        return started[-1]

    pool = WorkerPool(start, num_workers, journals, max_losses, lambda policy, session: None)
    async with asyncio.timeout(20), pool.running():
        yield Run(pool, started, [], may_start, failures)
    await own.writer.close()


def finished(assignment: Assignment) -> EpisodeFinished:
    return EpisodeFinished(assignment.ticket.episode_id, assignment.token, build_episode(assignment.ticket, [(3, 0)]))


async def write(folder: Path, worker: str, name: str, *entries: object) -> None:
    writer = JournalWriter(folder, worker)
    for entry in entries:
        await writer.append(*pack(name, entry))  # type: ignore[arg-type]
    await writer.close()


async def test_an_episode_goes_to_the_worker_with_the_fewest_that_generate(tmp_path: Path) -> None:
    async with run(tmp_path, 2) as pool:
        first, second = pool.started
        playing = [pool.play(f"e{number}") for number in range(3)]
        await first.has(2)
        await second.has(1)
        for assignment in first.assigned:
            first.events.put_nowait(PlaceFreed(assignment.ticket.episode_id, assignment.token))
        while len(pool.released) < 2:
            await asyncio.sleep(0)
        playing.append(pool.play("e3"))
        await first.has(3)
        for worker in pool.started:
            for assignment in worker.assigned:
                worker.events.put_nowait(finished(assignment))
        await asyncio.gather(*playing)


async def test_the_next_holder_has_a_higher_token_and_what_is_on_record_under_the_last(tmp_path: Path) -> None:
    async with run(tmp_path, 1) as pool:
        playing = pool.play("e0")
        (first,) = pool.started
        await first.has(1)
        held = first.assigned[0]
        lease = Leased(held.ticket, (), held.token)
        await write(tmp_path, "worker-1", "e0", lease, replace(lease, token=held.token - 1), replace(lease, token=0))
        pool.lose(first)
        while len(pool.started) < 2:
            await asyncio.sleep(0.001)
        second = pool.started[1]
        await second.has(1)
        again = second.assigned[0]
        assert again.token > held.token
        history = unpack_history(again.entries)
        assert history is not None
        assert history.entries == [lease], "what others wrote under other tokens is not this holder's"
        second.events.put_nowait(finished(held))
        second.events.put_nowait(finished(again))
        assert (await playing).reward == 1.0
        assert second.events.empty()


async def test_an_end_that_is_on_record_and_was_not_told_is_not_played_again(tmp_path: Path) -> None:
    async with run(tmp_path, 1) as pool:
        playing = pool.play("e0")
        (first,) = pool.started
        await first.has(1)
        held = first.assigned[0]
        verdict = Scored(held.token, ScoreRecord("verifier", Score(0.5)))
        end = Ended(held.token, StopReason.ANSWERED, None, 1.0)
        await write(tmp_path, "worker-1", "e0", Leased(held.ticket, (), held.token), verdict, end)
        pool.lose(first)
        assert (await playing).reward == 0.5
        assert all(not worker.assigned for worker in pool.started[1:])


@pytest.mark.parametrize(("running", "losses"), [(None, {"e0", "e1"}), ("e0", {"e0"})])
async def test_a_loss_counts_for_the_episode_that_ran_or_for_all_if_that_is_not_known(
    tmp_path: Path, running: str | None, losses: set[str]
) -> None:
    async with run(tmp_path, 1, max_losses=0) as pool:
        playing = {name: pool.play(name) for name in ("e0", "e1")}
        (first,) = pool.started
        await first.has(2)
        pool.lose(first, running)
        failed = {name: await playing[name] for name in losses}
        assert {str(episode.failure).partition(":")[0] for episode in failed.values()} == {"scaffold(crashed)"}
        while len(losses) < 2 and len(pool.started) < 2:
            await asyncio.sleep(0.001)
        for name in playing.keys() - losses:
            await pool.started[1].has(1)
            pool.started[1].events.put_nowait(finished(pool.started[1].assigned[0]))
            assert (await playing[name]).failure is None
        assert pool.pool.metrics()["workers/given_up_total"] == len(losses)


async def lose_a_session(pool: Run, folder: Path) -> tuple[asyncio.Task[Episode], DrivenWorker]:
    """An episode whose worker is gone while its session lives on, and the other worker."""
    playing = pool.play("e0")
    first, second = pool.started
    await first.has(1)
    held = first.assigned[0]
    opened = EnvironmentStarted(held.token, Opening((Message(Role.USER, "a task"),)), "session")
    await write(folder, "worker-1", "e0", Leased(held.ticket, (), held.token), opened)
    pool.may_start.clear()
    pool.lose(first)
    while pool.pool.metrics()["workers/handed_over_total"] < 1:
        await asyncio.sleep(0.001)
    return playing, second


async def test_an_episode_with_a_live_session_waits_for_a_worker_on_its_node(tmp_path: Path) -> None:
    async with run(tmp_path, 2) as pool:
        playing, other = await lose_a_session(pool, tmp_path)
        unbound = pool.play("e1")
        await other.has(1)
        pool.may_start.set()
        while len(pool.started) < 3:
            await asyncio.sleep(0.001)
        successor = pool.started[2]
        await successor.has(1)
        assert (successor.node, successor.assigned[0].ticket.episode_id) == ("node-0", "e0")
        assert [assignment.ticket.episode_id for assignment in other.assigned] == ["e1"]
        for worker in (successor, other):
            worker.events.put_nowait(finished(worker.assigned[0]))
        await asyncio.gather(playing, unbound)


async def test_an_episode_with_a_live_session_goes_elsewhere_if_no_worker_comes_up_on_its_node(tmp_path: Path) -> None:
    async with run(tmp_path, 2) as pool:
        playing, other = await lose_a_session(pool, tmp_path)
        assert not other.assigned
        pool.failures.append(WorkerLostError("crashed", "its node is gone"))
        pool.may_start.set()
        await other.has(1)
        other.events.put_nowait(finished(other.assigned[0]))
        assert (await playing).failure is None


async def test_what_is_lost_while_the_run_parks_is_parked(tmp_path: Path) -> None:
    async with run(tmp_path, 2) as pool:
        playing = [pool.play(f"e{number}") for number in range(2)]
        first, second = pool.started
        await first.has(1)
        await second.has(1)
        pool.lose(first)
        pool.pool.park()
        ends = await asyncio.gather(*playing, return_exceptions=True)
        assert [type(end) for end in ends] == [EpisodeParked] * 2


async def test_a_worker_that_cannot_go_on_ends_the_run_with_its_error(tmp_path: Path) -> None:
    async def fail() -> None:
        async with run(tmp_path, 1) as pool:
            playing = pool.play("e0")
            await pool.started[0].has(1)
            pool.started[0].events.put_nowait(WorkerFailed("StorageError", "the disk is full"))
            await playing

    with pytest.raises(StorageError, match="the disk is full"):
        await fail()
