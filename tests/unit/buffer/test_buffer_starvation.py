from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest
from buffer_states import at, attempt, make_buffer

from agentrl.buffer.config import BufferConfig
from agentrl.buffer.group import Group
from agentrl.buffer.staleness import build_batch
from agentrl.buffer.starvation import DroppedGroups, UntrainedSteps
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.testing.clock import run_virtual
from agentrl.types.errors import Boundary, Failure, StalledError
from agentrl.types.version import PolicyVersion

CRASH = Failure(Boundary.ENVIRONMENT, "crashed", "worker gone")
ALIKE = BufferConfig(group_size=2, groups_per_step=1, max_staleness=0, group_filter="spread", max_filtered_groups=3)


def failed(ticket):
    return replace(build_episode(ticket, [(2, 0)], reward=None), failure=CRASH, stop_reason=None)


def test_only_groups_in_a_row_end_a_run():
    dropped = DroppedGroups(2)
    assert dropped.add("no_spread", [1.0, 1.0], None) is None
    dropped.end_row()
    assert dropped.add("no_spread", [0.0, 0.0], None) is None
    assert "'spread' dropped 2 groups; the last had rewards [0.0, 0.0]" in str(
        dropped.add("no_spread", [0.0, 0.0], None)
    )


def test_a_mixed_row_names_every_reason_and_the_last_failure():
    dropped = DroppedGroups(3)
    dropped.add("no_spread", [1.0, 1.0], CRASH)
    dropped.add("group_failed", [1.0], CRASH)
    error = dropped.add("group_failed", [], CRASH)
    assert str(error).startswith(
        "the filter 'spread' dropped 1 groups; the last had rewards [1.0, 1.0]; 2 groups were dropped because too few "
        "of their episodes ended with a score; the last failure: environment(crashed): worker gone. That makes 3"
    )


def test_a_step_forgets_what_was_dropped_before_it_but_not_the_row():
    dropped = DroppedGroups(2)
    dropped.add("no_spread", [1.0, 1.0], None)
    assert "dropped 1 groups" in dropped.explain()
    dropped.begin_step()
    assert dropped.explain() == "no group was dropped"
    assert dropped.add("no_spread", [1.0, 1.0], None) is not None


async def test_groups_in_which_too_many_episodes_fail_end_the_run_although_others_go_well():
    """Failures are never in a row here, so no other count ends it."""
    config = BufferConfig(group_size=2, groups_per_step=1, max_staleness=0, max_filtered_groups=3)
    buffer = make_buffer(config, [], failures=2)
    take = asyncio.create_task(buffer.take(*at(0)))
    for _ in range(2):
        await buffer.settle(failed(await buffer.admit()))
        await buffer.settle(build_episode(await buffer.admit(), [(2, 0)]))
    assert not take.done()
    await buffer.settle(failed(await buffer.admit()))
    with pytest.raises(StalledError, match=r"3 groups were dropped because too few .* worker gone"):
        await buffer.settle(build_episode(await buffer.admit(), [(2, 0)]))
    with pytest.raises(StalledError, match="change them, or the group size"):
        await take


@pytest.mark.parametrize(("places", "num_slow", "staleness"), [(3, 1, 4), (64, 2, 0)])
async def test_a_filter_that_starves_the_step_ends_it_although_every_place_is_in_use(places, num_slow, staleness):
    """Slow episodes and those of filtered groups fill all places, or the whole staleness bound of 4 episodes."""
    config = ALIKE.model_copy(update={"groups_per_step": 2, "max_staleness": staleness})
    buffer = make_buffer(config, [], places=places)
    for _ in range(num_slow):
        await buffer.admit()
    take = asyncio.create_task(buffer.take(*at(0)))
    with pytest.raises(StalledError, match="filter 'spread' dropped 3 groups"):
        await fill_with_groups_that_agree(buffer, num_running=min(places, 4))
    with pytest.raises(StalledError, match="filter 'spread' dropped 3 groups"):
        await take


async def fill_with_groups_that_agree(buffer, num_running: int) -> None:
    for _ in range(10):
        tickets = []
        while (ticket := await attempt(buffer.admit())) is not None:
            tickets.append(ticket)
        assert buffer.num_running == num_running
        for ticket in tickets:
            await buffer.settle(build_episode(ticket, [(2, 0)], 1.0))


def test_a_step_that_times_out_names_the_filter_that_dropped_what_came():
    async def starve() -> None:
        buffer = make_buffer(ALIKE.model_copy(update={"stall_s": 60.0}), [], places=2)
        for _ in range(2):
            for ticket in [await buffer.admit() for _ in range(2)]:
                await buffer.settle(build_episode(ticket, [(2, 0)], 1.0))
        _hung = [await buffer.admit() for _ in range(2)]
        await buffer.take(*at(0))

    with pytest.raises(
        StalledError, match=r"step 0 .* waited 60 s .* filter 'spread' dropped 2 groups; .* last failure"
    ):
        run_virtual(starve())


def batch_at(config: BufferConfig, step: int, sampled_at: int):
    """A step's batch of one episode, whose tokens are of one earlier version."""
    ticket = build_ticket(step=sampled_at)
    group = Group(0, ticket.task, 1, sampled_at, episodes=[build_episode(ticket, [(2, sampled_at)], 1.0)])
    return build_batch([group], "main", PolicyVersion(0, step), config)


@pytest.mark.parametrize(
    ("staleness", "words"),
    [
        ("mask_spans", r"'mask_spans' masks every token .*make episodes shorter; or set buffer.staleness = 'wait'$"),
        ("withhold", r"'withhold' leaves out every episode with a token .*; or set buffer.staleness = 'wait'$"),
        ("wait", r"'wait' masks every token .*raise buffer.max_staleness, or make episodes shorter$"),
    ],
)
def test_steps_of_nothing_but_stale_tokens_end_a_run_and_name_policy_and_bound(staleness, words):
    """With max_staleness 2 three steps may be in flight, and four more are let pass: the seventh is an error."""
    config = BufferConfig(group_size=1, groups_per_step=1, max_staleness=2, staleness=staleness)
    untrained = UntrainedSteps(config)
    assert [untrained.add(batch_at(config, step, step - 3)) for step in range(3, 9)] == [None] * 6
    message = str(untrained.add(batch_at(config, 9, 6)))
    assert message.startswith(
        "policy 'main' has not one token to train in 7 steps in a row, up to that after version 0.9: buffer.staleness"
    )
    assert "more than buffer.max_staleness = 2 steps old" in message
    assert re.search(words, message)


@pytest.mark.parametrize("staleness", ["mask_spans", "withhold"])
def test_one_step_with_a_token_to_train_begins_the_row_anew(staleness):
    config = BufferConfig(group_size=1, groups_per_step=1, max_staleness=0, staleness=staleness)
    untrained = UntrainedSteps(config)
    for _ in range(3):
        assert [untrained.add(batch_at(config, 5, 4)) for _ in range(4)] == [None] * 4
        assert untrained.add(batch_at(config, 5, 5)) is None
