from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
from buffer_states import at, attempt, make_buffer

from agentrl.buffer.admission import admissible
from agentrl.buffer.config import BufferConfig
from agentrl.buffer.frontier import FrontierState
from agentrl.testing.builders import build_episode
from agentrl.types.errors import Boundary, Failure

CRASH = Failure(Boundary.ENVIRONMENT, "crashed", "gone")


@pytest.mark.parametrize(
    ("places", "running", "accepted", "loaded", "batch", "staleness", "expected"),
    [
        (64, 0, 0, 0, 64, 0, 64),  # the first step's episodes, and not one more
        (64, 0, 64, 0, 64, 0, 0),
        (64, 0, 64, 1, 64, 0, 64),
        (8, 6, 0, 0, 64, 2, 2),  # places bind before staleness does
        (100, 4, 30, 2, 8, 2, 6),  # (2 + 2 + 1) * 8 - 34
        (100, 0, 41, 2, 8, 2, 0),  # never negative
        (64, 60, 10**6, 0, 8, math.inf, 4),  # without a bound only places count
        (64, 64, 0, 0, 8, math.inf, 0),
    ],
)
def test_admission_is_the_smaller_of_free_places_and_the_staleness_bound(
    places, running, accepted, loaded, batch, staleness, expected
):
    assert admissible(places, running, accepted, loaded, batch, staleness) == expected


async def admit_all(buffer):
    tickets = []
    while (ticket := await attempt(buffer.admit())) is not None:
        tickets.append(ticket)
    return tickets


def failed(ticket):
    return replace(build_episode(ticket, [(2, 0)], reward=None), failure=CRASH, stop_reason=None)


async def test_groups_are_filled_member_by_member_with_names_and_seeds_of_their_own():
    buffer = make_buffer(BufferConfig(group_size=2, groups_per_step=2, max_staleness=0), [])
    tickets = await admit_all(buffer)
    assert [(t.group, t.member) for t in tickets] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [t.episode_id for t in tickets][:3] == ["train-000000-0", "train-000000-1", "train-000001-0"]
    assert len({t.seed for t in tickets}) == 4
    again = await admit_all(make_buffer(BufferConfig(group_size=2, groups_per_step=2, max_staleness=0), []))
    assert [t.seed for t in again] == [t.seed for t in tickets]


async def test_a_released_place_admits_another_although_no_score_is_in():
    buffer = make_buffer(BufferConfig(group_size=1, groups_per_step=4, max_staleness=0), [], places=1)
    [first] = await admit_all(buffer)
    await buffer.release(first)
    await buffer.release(first)
    assert (buffer.num_running, len(await admit_all(buffer))) == (0, 1)


async def test_admission_waits_until_the_version_is_loaded_and_not_only_trained():
    buffer = make_buffer(BufferConfig(group_size=1, groups_per_step=1, max_staleness=0), [])
    [ticket] = await admit_all(buffer)
    await buffer.settle(build_episode(ticket, [(2, 0)]))
    await buffer.take(*at(0))
    await buffer.trained(*at(1))
    assert await admit_all(buffer) == []
    waiting = asyncio.create_task(buffer.admit())
    await buffer.loaded(*at(1))
    assert (await waiting).started_at == dict([at(1)])


async def test_a_failed_episode_gives_its_place_back_to_its_own_next_attempt():
    buffer = make_buffer(BufferConfig(group_size=2, groups_per_step=1, max_staleness=0), [], attempts=2)
    first, _second = await admit_all(buffer)
    await buffer.settle(failed(first))
    [retry] = await admit_all(buffer)
    assert (retry.group, retry.member, retry.attempt) == (0, 0, 1)
    assert retry.episode_id == "train-000000-0-retry1"
    assert retry.seed != first.seed
    await buffer.settle(failed(retry))
    assert await admit_all(buffer) == []


async def test_a_group_that_failed_gives_all_its_places_back():
    buffer = make_buffer(BufferConfig(group_size=2, groups_per_step=1, max_staleness=0), [])
    first, second = await admit_all(buffer)
    await buffer.settle(build_episode(first, [(2, 0)]))
    await buffer.settle(failed(second))
    assert [t.group for t in await admit_all(buffer)] == [1, 1]


async def test_a_failed_member_of_a_group_that_trains_does_not_let_a_stale_one_in():
    buffer = make_buffer(BufferConfig(group_size=3, groups_per_step=1, max_staleness=0), [])
    first, second, third = await admit_all(buffer)
    await buffer.settle(failed(third))
    assert await admit_all(buffer) == []
    for ticket in (first, second):
        await buffer.settle(build_episode(ticket, [(2, 0)]))
    batch = await buffer.take(*at(0))
    assert [entry.episode_id for entry in batch.episodes] == [first.episode_id, second.episode_id]


async def test_after_a_restore_the_trained_episodes_count_and_their_tasks_do_not_come_again():
    config = BufferConfig(group_size=2, groups_per_step=1, max_staleness=1)
    buffer = make_buffer(config, [], step=3, frontier=FrontierState(2, (3,)))
    assert [t.group for t in await admit_all(buffer)] == [2, 2, 4, 4]


async def test_a_limited_number_of_groups_is_made_up_for_groups_that_were_dropped():
    buffer = make_buffer(BufferConfig(group_size=1, groups_per_step=4, max_staleness=0), [], max_groups=2)
    first, second = await admit_all(buffer)
    await buffer.settle(build_episode(first, [(2, 0)]))
    await buffer.settle(failed(second))
    assert [t.group for t in await admit_all(buffer)] == [2]
