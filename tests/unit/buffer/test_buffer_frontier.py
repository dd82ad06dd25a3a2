from __future__ import annotations

from buffer_states import at, frontier_of, make_buffer
from hypothesis import given
from hypothesis import strategies as st

from agentrl.buffer.config import BufferConfig
from agentrl.buffer.frontier import Frontier, FrontierState
from agentrl.envs.epochs import place_in_list
from agentrl.testing.builders import build_episode
from agentrl.types.task import Split, Task


def test_ordinals_come_in_order():
    frontier = Frontier()
    assert [frontier.next() for _ in range(4)] == [0, 1, 2, 3]


def test_a_restored_frontier_repeats_what_was_in_flight_and_nothing_else():
    frontier = Frontier()
    for _ in range(4):
        frontier.next()
    frontier.finish([0, 1, 3])
    assert frontier.state() == FrontierState(2, (3,))
    restored = Frontier.restore(frontier.state())
    assert [restored.next() for _ in range(3)] == [2, 4, 5]


def test_a_gap_that_closes_after_a_restore_does_not_bring_back_what_lay_behind_it():
    restored = Frontier.restore(FrontierState(2, (3,)))
    assert restored.next() == 2
    restored.finish([2])
    assert restored.state() == FrontierState(4)
    assert restored.next() == 4


def test_what_was_done_before_a_restore_may_be_said_again_and_leaves_no_trace():
    restored = Frontier.restore(FrontierState(2, (4,)))
    restored.finish([0, 4, 1])
    assert restored.state() == FrontierState(2, (4,))
    assert restored.next() == 2


@given(st.lists(st.tuples(st.integers(0, 6), st.randoms(use_true_random=False)), max_size=8))
def test_nothing_is_skipped_or_repeated_whatever_finished_before_a_restore(rounds):
    frontier, done = Frontier(), []
    for num_handed_out, chance in rounds:
        in_flight = []
        for _ in range(num_handed_out):
            in_flight.append(frontier.next())
            chance.shuffle(in_flight)
            finished = [in_flight.pop() for _ in range(chance.randint(0, len(in_flight)))]
            frontier.finish(finished)
            done += finished
        frontier = Frontier.restore(frontier.state())
    assert len(done) == len(set(done))
    remaining = [frontier.next() for _ in range(30)]
    assert remaining == sorted(set(range(max([*done, *remaining]) + 1)) - set(done))[:30]


async def test_a_run_over_a_list_of_tasks_trains_each_once_an_epoch_and_so_does_its_resumption():
    """Steps of 2 tasks over a list of 5, with a restart in the middle of every epoch: 2 epochs in 5 steps."""
    config, frontier, lines = BufferConfig(group_size=2, groups_per_step=2, max_staleness=0), FrontierState(), []
    for step in range(5):
        buffer = make_buffer(
            config,
            lines,
            step=step,
            frontier=frontier,
            sample_task=lambda number: Task("fake", Split.TRAIN, place_in_list(number, 5, seed=3)),
        )
        for ticket in [await buffer.admit() for _ in range(4)]:
            await buffer.settle(build_episode(ticket, [(2, step)], reward=float(ticket.member)))
        await buffer.take(*at(step))
        await buffer.trained(*at(step + 1))
        frontier = frontier_of(buffer, step + 1)
    tasks = [line.task for line in lines if line.member == 0]
    assert sorted(tasks[:5]) == sorted(tasks[5:]) == [f"fake/train/{n}" for n in range(5)]
    assert frontier == FrontierState(10)
    assert len({line.episode_id for line in lines}) == 20
