from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from buffer_states import at, attempt, frontier_of, make_buffer

from agentrl.buffer.config import BufferConfig
from agentrl.buffer.frontier import FrontierState
from agentrl.buffer.group import Group
from agentrl.buffer.ledger import LedgerLine
from agentrl.buffer.recovery import Recovered
from agentrl.testing.builders import build_episode
from agentrl.testing.clock import run_virtual
from agentrl.types.errors import CUT_OFF, Boundary, Failure, StalledError

CRASH = Failure(Boundary.ENVIRONMENT, "crashed", "worker gone")


def failed(ticket):
    return replace(build_episode(ticket, [(2, 0)], reward=None), failure=CRASH, stop_reason=None)


async def admit_all(buffer):
    tickets = []
    while (ticket := await attempt(buffer.admit())) is not None:
        tickets.append(ticket)
    return tickets


async def test_a_take_gives_the_oldest_complete_groups_in_order_of_tasks_and_members():
    buffer = make_buffer(BufferConfig(group_size=2, groups_per_step=2, max_staleness=1), [])
    tickets = await admit_all(buffer)
    for ticket in reversed(tickets):
        await buffer.settle(build_episode(ticket, [(2, 0)], float(ticket.member)))
    batch = await buffer.take(*at(0))
    assert [(e.episode_id, e.group, e.reward) for e in batch.episodes] == [
        ("train-000000-0", 0, 0.0),
        ("train-000000-1", 0, 1.0),
        ("train-000001-0", 1, 0.0),
        ("train-000001-1", 1, 1.0),
    ]
    assert (batch.num_sampled_tokens, buffer.num_ready("main")) == (8, 4)


async def test_a_take_waits_until_the_last_group_is_complete():
    buffer = make_buffer(BufferConfig(group_size=2, groups_per_step=1, max_staleness=0), [])
    first, second = await admit_all(buffer)
    await buffer.settle(build_episode(first, [(2, 0)]))
    take = asyncio.create_task(buffer.take(*at(0)))
    await asyncio.sleep(0)
    assert not take.done()
    await buffer.settle(build_episode(second, [(2, 0)]))
    assert len((await take).episodes) == 2


async def test_an_infrastructure_failure_leaves_the_group_and_its_baseline():
    buffer = make_buffer(BufferConfig(group_size=3, groups_per_step=1, max_staleness=0), lines := [])
    good, bad, fine = await admit_all(buffer)
    await buffer.settle(build_episode(good, [(2, 0)], 1.0))
    await buffer.settle(failed(bad))
    await buffer.settle(build_episode(fine, [(2, 0)], 0.5))
    batch = await buffer.take(*at(0))
    assert [e.reward for e in batch.episodes] == [1.0, 0.5]
    assert [(line.outcome, line.reason, line.reward) for line in lines] == [("dropped", "environment_crashed", None)]


async def test_an_episode_without_a_score_is_not_an_episode_with_score_zero():
    buffer = make_buffer(BufferConfig(group_size=3, groups_per_step=1, max_staleness=0), lines := [])
    tickets = await admit_all(buffer)
    for ticket, reward in zip(tickets, [0.0, None, 1.0], strict=True):
        await buffer.settle(build_episode(ticket, [(2, 0)], reward))
    assert [e.reward for e in (await buffer.take(*at(0))).episodes] == [0.0, 1.0]
    assert [line.reason for line in lines] == ["not_scored"]


async def test_the_filter_drops_groups_that_agree_and_samples_others():
    config = BufferConfig(group_size=2, groups_per_step=1, max_staleness=0, group_filter="spread")
    buffer = make_buffer(config, lines := [])
    for ticket in await admit_all(buffer):
        await buffer.settle(build_episode(ticket, [(2, 0)], 1.0))
    assert {(line.outcome, line.reason) for line in lines} == {("dropped", "no_spread")}
    assert frontier_of(buffer, 1) == FrontierState(1)
    for ticket in await admit_all(buffer):
        await buffer.settle(build_episode(ticket, [(2, 0)], float(ticket.member)))
    assert [e.reward for e in (await buffer.take(*at(0))).episodes] == [0.0, 1.0]


async def test_a_run_whose_groups_are_all_filtered_stops_and_says_so():
    config = BufferConfig(
        group_size=2, groups_per_step=1, max_staleness=0, group_filter="spread", max_filtered_groups=3
    )
    buffer = make_buffer(config, [])
    take = asyncio.create_task(buffer.take(*at(0)))
    for _ in range(2):
        for ticket in await admit_all(buffer):
            await buffer.settle(build_episode(ticket, [(2, 0)], 1.0))
    assert not take.done()
    first, second = await admit_all(buffer)
    await buffer.settle(build_episode(first, [(2, 0)], 1.0))
    with pytest.raises(StalledError, match=r"'spread' dropped 3 groups; the last had rewards \[1\.0, 1\.0\]"):
        await buffer.settle(build_episode(second, [(2, 0)], 1.0))
    with pytest.raises(StalledError, match="Nothing is left to learn"):
        await take


async def test_failures_in_a_row_stop_the_run_and_one_success_between_starts_the_count_anew():
    buffer = make_buffer(BufferConfig(group_size=8, groups_per_step=1, max_staleness=0), [], failures=3)
    tickets = await admit_all(buffer)
    take = asyncio.create_task(buffer.take(*at(0)))
    for ticket in tickets[:2]:
        await buffer.settle(failed(ticket))
    await buffer.settle(build_episode(tickets[2], [(2, 0)]))
    for ticket in tickets[3:5]:
        await buffer.settle(failed(ticket))
    assert not take.done()
    with pytest.raises(StalledError, match=r"3 episodes failed in a row; the last: environment\(crashed\): worker"):
        await buffer.settle(failed(tickets[5]))
    with pytest.raises(StalledError, match="resume the run"):
        await take


async def test_episodes_that_were_cut_off_are_no_failures_in_a_row():
    buffer = make_buffer(BufferConfig(group_size=8, groups_per_step=1, max_staleness=0), [], failures=3)
    tickets = await admit_all(buffer)
    gone = Failure(Boundary.SCAFFOLD, CUT_OFF, "its program ended with the worker that played it")
    for ticket in tickets[:5]:
        await buffer.settle(replace(failed(ticket), failure=gone))
    await buffer.settle(failed(tickets[5]))
    await buffer.settle(failed(tickets[6]))
    with pytest.raises(StalledError, match="3 episodes failed in a row"):
        await buffer.settle(failed(tickets[7]))


async def test_what_a_resumed_run_cannot_go_on_with_is_no_failure_in_a_row():
    config = BufferConfig(group_size=8, groups_per_step=1, max_staleness=0)
    (first, *_) = tickets = await admit_all(make_buffer(config, [], failures=3))
    lines: list[LedgerLine] = []
    buffer = make_buffer(config, lines, failures=3)
    in_flight = {(ticket.member, 0) for ticket in tickets}
    group = Group(0, first.task, 8, {"main": 0}, first.environment, 8, in_flight, waits_for={"main"})
    buffer.restore(Recovered(groups=(group,), running=tuple(tickets)))
    for ticket in tickets:
        await buffer.settle(failed(ticket))
    assert [line.reason for line in lines] == ["environment_crashed"] * 8, "and none of them has ended the run"


def test_a_step_that_gets_nothing_ends_at_its_deadline_and_says_what_it_waited_for():
    async def wait_for_nothing() -> float:
        loop = asyncio.get_running_loop()
        buffer = make_buffer(BufferConfig(group_size=2, groups_per_step=2, max_staleness=0, stall_s=900), [])
        tickets = [await buffer.admit() for _ in range(3)]
        await buffer.settle(build_episode(tickets[0], [(2, 0)]))
        await buffer.settle(build_episode(tickets[1], [(2, 0)]))
        with pytest.raises(
            StalledError, match=r"step 0 of policy 'main' waited 900 s .* 1 are ready, 1 incomplete, 1 episodes gen"
        ):
            await buffer.take(*at(0))
        return loop.time()

    assert run_virtual(wait_for_nothing()) == 900


async def test_withhold_leaves_a_stale_episode_out_of_the_loss_and_its_reward_in_the_group():
    config = BufferConfig(group_size=2, groups_per_step=1, max_staleness=1, staleness="withhold")
    buffer = make_buffer(config, lines := [], step=2)
    tickets = await admit_all(buffer)
    await buffer.settle(build_episode(tickets[0], [(3, 1), (2, 2)], 0.0))  # staleness 1 is within the bound
    await buffer.settle(build_episode(tickets[1], [(4, 2)], 1.0))
    batch = await buffer.take(*at(2))
    assert [len(e.trajectories) for e in batch.episodes] == [1, 1]
    await buffer.trained(*at(3))
    for ticket in tickets[2:]:
        await buffer.settle(build_episode(ticket, [(3, 1), (2, 3)], 0.5 * ticket.member))
    batch = await buffer.take(*at(3))
    assert [(len(e.trajectories), e.reward) for e in batch.episodes] == [(0, 0.0), (0, 0.5)]
    await buffer.trained(*at(4))
    assert [(line.trained_tokens, line.masked_tokens) for line in lines] == [(5, 0), (4, 0), (0, 5), (0, 5)]


async def test_mask_spans_trains_the_fresh_part_of_the_same_episodes():
    config = BufferConfig(group_size=1, groups_per_step=1, max_staleness=1)
    buffer = make_buffer(config, lines := [], step=3)
    [ticket, *_] = await admit_all(buffer)
    await buffer.settle(build_episode(ticket, [(3, 1), (2, 3)]))
    batch = await buffer.take(*at(3))
    assert (batch.num_sampled_tokens, batch.num_trained_tokens) == (5, 2)
    await buffer.trained(*at(4))
    assert [(line.trained_tokens, line.masked_tokens, line.step) for line in lines] == [(2, 3, 4)]


async def test_wait_holds_the_step_for_the_group_that_would_expire():
    """S 1, one group a step: three groups are under way, the oldest of them last to end."""
    config = BufferConfig(group_size=1, groups_per_step=1, max_staleness=1, staleness="wait")
    buffer = make_buffer(config, [])
    first, slow = await admit_all(buffer)
    await buffer.settle(build_episode(first, [(2, 0)]))
    await buffer.take(*at(0))
    await buffer.trained(*at(1))
    await buffer.loaded(*at(1))
    [young] = await admit_all(buffer)
    await buffer.settle(build_episode(young, [(2, 1)]))
    take = asyncio.create_task(buffer.take(*at(1)))
    await asyncio.sleep(0)
    assert not take.done()
    await buffer.settle(build_episode(slow, [(2, 0), (2, 1)]))
    batch = await take
    assert [e.episode_id for e in batch.episodes] == [slow.episode_id]
    assert batch.num_trained_tokens == 4


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_wait_trains_every_token_while_versions_advance_in_lockstep_with_takes(staleness):
    async def play() -> list[tuple[int, int]]:
        config = BufferConfig(group_size=2, groups_per_step=2, max_staleness=staleness, staleness="wait")
        buffer = make_buffer(config, [], places=8)
        version = 0

        async def episode(ticket) -> None:
            await asyncio.sleep(1 + 7 * (ticket.group % 5 == 0) + ticket.member)
            start = ticket.started_at["main"].step
            await buffer.settle(build_episode(ticket, [(2, start), (1, version)]))

        async def produce() -> None:
            async with asyncio.TaskGroup() as episodes:
                while True:
                    episodes.create_task(episode(await buffer.admit()))

        producing = asyncio.create_task(produce())
        seen = []
        for step in range(12):
            batch = await buffer.take(*at(step))
            oldest = max(int(t.staleness.max()) for e in batch.episodes for t in e.trajectories)
            seen.append((oldest, batch.num_sampled_tokens - batch.num_trained_tokens))
            await asyncio.sleep(2)
            version = step + 1
            await buffer.trained(*at(version))
            await buffer.loaded(*at(version))
        producing.cancel()
        await asyncio.wait([producing])
        return seen

    seen = run_virtual(play())
    assert all(oldest <= staleness and masked == 0 for oldest, masked in seen)
    assert max(oldest for oldest, _ in seen) == staleness
