from __future__ import annotations

import asyncio

import pytest
from buffer_states import at, attempt, make_buffer
from hypothesis import given
from hypothesis import strategies as st

from agentrl.buffer.config import BufferConfig
from agentrl.buffer.order import in_window
from agentrl.config.base import parse_config
from agentrl.testing.builders import build_episode
from agentrl.testing.clock import run_virtual
from agentrl.types.errors import ConfigError

NUMBERS = st.sets(st.integers(0, 30))


@pytest.mark.parametrize(
    ("ready", "outstanding", "window", "expected"),
    [
        ([8, 4, 7, 6, 5], [3], None, [4, 5]),
        ([8, 4, 7, 6, 5], [3], 4, [4, 5]),
        ([8, 7, 6], [3], 4, [6]),  # 7 is not below 3 + 4
        ([8, 7, 6, 3], [], 4, [3, 6]),  # nothing is outstanding, so nothing is overtaken
        ([8, 9], [3, 5], 4, []),
        ([2, 90], [91], 2, [2, 90]),  # ready groups hold nobody back
    ],
)
def test_a_take_gets_the_oldest_that_are_not_too_far_ahead(ready, outstanding, window, expected):
    assert in_window(dict.fromkeys(ready, 0), outstanding, window)[:2] == expected


def test_a_task_that_begins_anew_after_a_crash_is_as_young_as_its_beginning():
    """It has a low number; were it taken first, the older ones would grow too old for `wait`."""
    assert in_window({5: 9, 6: 3, 7: 3, 8: 4}, [], None) == [6, 7, 8, 5]


@given(NUMBERS, NUMBERS, st.integers(1, 4), st.integers(1, 8))
def test_nobody_overtakes_by_the_window_or_more_and_nobody_else_is_held_back(ready, outstanding, count, window):
    ready = ready - outstanding
    chosen = in_window(dict.fromkeys(ready, 0), outstanding, window)[:count]
    assert all(young - slow < window for young in chosen for slow in outstanding)
    refused = sorted(ready - set(chosen))
    assert all(young > old for young in refused for old in chosen)
    assert len(chosen) == count or all(young - min(outstanding) >= window for young in refused)


@given(NUMBERS, st.integers(1, 8))
def test_once_nothing_is_outstanding_the_window_holds_nothing_back(ready, window):
    assert in_window(dict.fromkeys(ready, 0), [], window) == sorted(ready)


def test_a_window_that_holds_less_than_a_step_is_refused():
    assert BufferConfig(groups_per_step=4, order_window=4).order_window == 4
    with pytest.raises(ConfigError, match="order_window 3 is less than groups_per_step 4"):
        parse_config(BufferConfig, {"groups_per_step": 4, "order_window": 3}, "recipe")


async def test_a_step_waits_for_the_slow_group_that_it_would_overtake_too_far():
    config = BufferConfig(group_size=1, groups_per_step=1, max_staleness=3, order_window=2)
    buffer = make_buffer(config, [])
    slow, near, far, _ = [await buffer.admit() for _ in range(4)]
    for ticket in (near, far):
        await buffer.settle(build_episode(ticket, [(2, 0)]))
    assert [e.episode_id for e in (await buffer.take(*at(0))).episodes] == [near.episode_id]
    await buffer.trained(*at(1))
    assert await attempt(buffer.take(*at(1))) is None
    await buffer.settle(build_episode(slow, [(2, 0)]))
    assert [e.episode_id for e in (await buffer.take(*at(1))).episodes] == [slow.episode_id]


@given(
    seconds=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    staleness=st.integers(0, 3),
    window=st.sampled_from([2, 3, 5]),
    policy=st.sampled_from(["mask_spans", "wait"]),
    filtered_every=st.integers(2, 5),
)
def test_no_take_waits_for_ever_whatever_is_slow_or_filtered(seconds, staleness, window, policy, filtered_every):
    """`stall_s` is longer than any two groups of episodes take, so a take that hangs raises."""

    async def play() -> None:
        config = BufferConfig(
            group_size=2, groups_per_step=2, max_staleness=staleness, staleness=policy, order_window=window,
            group_filter="spread", stall_s=1000.0,
        )  # fmt: skip
        buffer = make_buffer(config, [], places=5)

        async def episode(ticket) -> None:
            await asyncio.sleep(seconds[(ticket.group + ticket.member) % len(seconds)])
            reward = float(ticket.member) if ticket.group % filtered_every else 1.0
            await buffer.settle(build_episode(ticket, [(2, ticket.started_at["main"].step)], reward))

        async def produce() -> None:
            async with asyncio.TaskGroup() as episodes:
                while True:
                    episodes.create_task(episode(await buffer.admit()))

        producing = asyncio.create_task(produce())
        for step in range(8):
            await buffer.take(*at(step))
            await buffer.trained(*at(step + 1))
            await buffer.loaded(*at(step + 1))
        producing.cancel()
        await asyncio.wait([producing])

    run_virtual(play())
