from __future__ import annotations

import pytest
from buffer_states import at, attempt, frontier_of
from crashing_run import CrashingRun, DiedError

from agentrl.buffer.config import BufferConfig
from agentrl.buffer.frontier import FrontierState
from agentrl.buffer.recovery import Recovered
from agentrl.journal.entries import Dropped, unpack
from agentrl.types.errors import Boundary, Failure

CONFIG = BufferConfig(group_size=2, groups_per_step=1, max_staleness=1, group_filter="spread")


async def play_all(run: CrashingRun, rewards: dict[int, float]) -> list[str]:
    """Dispatch what may be, and end all of it with rewards by member."""
    names = []
    while (ticket := await attempt(run.buffer.admit())) is not None:
        await run.open(ticket)
        await run.playing[ticket.episode_id].reply(2, 0)
        await run.end(ticket.episode_id, rewards[ticket.member], None)
        names.append(ticket.episode_id)
        if len(names) == 2:
            break
    return names


async def die_in_take(num_lost: int) -> tuple[CrashingRun, Recovered, list[str]]:
    """A run that died while it recorded its first step, begun anew without the last entries of its disk."""
    run = CrashingRun(CONFIG, places=4, attempts=1)
    run.start()
    names = await play_all(run, {0: 0.0, 1: 1.0})
    run.buffer_disk.dies_in_append = True
    with pytest.raises(DiedError):
        await run.buffer.take(*at(0))
    run.buffer_disk.crash(num_lost)
    recovered, _ = run.start()
    return run, recovered, names


async def test_a_drop_that_a_checkpoint_saw_and_no_record_kept_is_not_on_the_ledger_twice():
    run = CrashingRun(CONFIG, places=4, attempts=1)
    run.start()
    names = await play_all(run, {0: 1.0, 1: 1.0})
    with pytest.raises(DiedError):
        await run.save(0, "before its record")
    run.buffer_disk.crash(num_lost=1)
    recovered, _ = run.start()
    assert (recovered.groups, recovered.dropped) == ((), ())
    assert [line.episode_id for line in run.lines] == names
    assert frontier_of(run.buffer, 1) == FrontierState(1)
    assert [ticket.group for ticket in [await run.buffer.admit()]] == [1]


async def test_a_step_whose_record_was_kept_is_done_though_the_trainer_never_heard_of_it():
    run, recovered, names = await die_in_take(num_lost=0)
    [batch] = await run.redo(recovered)
    assert [episode.episode_id for episode in batch.episodes] == names
    assert frontier_of(run.buffer, 1) == FrontierState(1)


async def test_a_step_whose_record_was_lost_is_taken_anew():
    run, recovered, names = await die_in_take(num_lost=1)
    assert recovered.redo == {}
    batch = await run.buffer.take(*at(0))
    assert [episode.episode_id for episode in batch.episodes] == names


async def test_an_episode_goes_on_behind_its_last_reply_on_record():
    run = CrashingRun(CONFIG, places=4, attempts=1)
    run.start()
    ticket = await run.buffer.admit()
    await run.open(ticket)
    for tokens in (2, 3, 1):
        await run.playing[ticket.episode_id].reply(tokens, 0)
    run.worker_disk.crash(num_lost=1)
    recovered, histories = run.start()
    assert recovered.running == (ticket,)
    await run.open(ticket, histories[ticket.episode_id])
    assert run.playing[ticket.episode_id].replies == [(2, 0), (3, 0)]
    assert run.buffer.num_running == 1


@pytest.mark.parametrize("dies", [False, True])
async def test_journal_and_ledger_give_one_reason_for_an_episode_that_failed(dies: bool):
    lost = Failure(Boundary.ENVIRONMENT, "lost", "its worker is gone")
    run = CrashingRun(CONFIG, places=4, attempts=3)
    run.start()
    for failure in (lost, Failure(Boundary.TIMEOUT, "environment.step", "no result")):
        ticket = await run.buffer.admit()
        await run.open(ticket)
        await run.playing[ticket.episode_id].reply(2, 0)
        await run.end(ticket.episode_id, None, failure)
    if dies:
        run.start()
    await play_all(run, {0: 1.0, 1: 1.0})
    dropped = [entry for record in run.buffer_disk.records if isinstance(entry := unpack(*record), Dropped)]
    reasons = {name: entry.reason for entry in dropped for name in entry.episodes}
    assert reasons == {line.episode_id: line.reason for line in run.lines}
    assert sorted(reasons.values()) == ["environment_lost", "no_spread", "no_spread", "timeout_environment.step"]
