from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.buffer.frontier import Frontier
from agentrl.envs.epochs import place_in_list
from agentrl.envs.inline import InlineHost
from agentrl.testing.environments import FaultyOptions, faulty
from agentrl.types.errors import ConfigError
from agentrl.types.task import Split

SIZES, SEEDS = st.integers(1, 40), st.integers(0, 2**63)


@given(size=SIZES, seed=SEEDS, num_epochs=st.integers(1, 4), chance=st.randoms(use_true_random=False), data=st.data())
def test_every_epoch_is_a_permutation_wherever_a_run_is_split_in_two(size, seed, num_epochs, chance, data):
    """The first run ends with some ordinals in flight, in any order; the second has nothing but its frontier."""
    total = size * num_epochs
    first = Frontier()
    handed_out = [first.next() for _ in range(data.draw(st.integers(0, total)))]
    done = chance.sample(handed_out, data.draw(st.integers(0, len(handed_out))))
    first.finish(done)
    second = Frontier.restore(first.state())
    done += [second.next() for _ in range(total - len(done))]
    epochs: dict[int, Counter[int]] = {}
    for ordinal in done:
        epochs.setdefault(ordinal // size, Counter())[place_in_list(ordinal, size, seed)] += 1
    assert epochs == {epoch: Counter(range(size)) for epoch in range(num_epochs)}


def test_epochs_and_seeds_have_orders_of_their_own_which_never_change():
    """A resumed run may have another Python: the orders are written out, so that a new one is seen here."""
    orders = [[place_in_list(ordinal, 6, seed) for ordinal in range(12)] for seed in (0, 1)]
    assert orders == [[0, 3, 4, 1, 5, 2, 3, 1, 2, 0, 4, 5], [5, 1, 2, 3, 4, 0, 0, 5, 1, 4, 2, 3]]


def test_training_tasks_of_a_list_come_by_epochs_and_held_out_ones_as_they_are():
    listed = replace(faulty, num_tasks=lambda options: 5)
    train, heldout = (listed.sampler(FaultyOptions(), split, 7) for split in Split)
    ordinals = [train(number).ordinal for number in range(10)]
    assert sorted(ordinals[:5]) == sorted(ordinals[5:]) == list(range(5))
    assert ordinals[:5] != ordinals[5:]
    assert [heldout(number).ordinal for number in range(7)] == list(range(7))


async def test_a_host_draws_from_the_list_that_its_environment_declares():
    host = InlineHost(replace(faulty, num_tasks=lambda options: 5), FaultyOptions(), 5.0)
    assert host.description.num_tasks == 5
    tasks = await host.sample(Split.TRAIN, 7, range(5, 10))
    assert sorted(task.ordinal for task in tasks) == list(range(5))


def test_an_environment_without_a_list_is_asked_for_the_runs_own_ordinals():
    sample_task = faulty.sampler(FaultyOptions(), Split.TRAIN, 7)
    assert [sample_task(number).ordinal for number in (0, 3, 1000)] == [0, 3, 1000]
    assert sample_task(3).payload == {"seed": 7}


def test_an_empty_list_is_refused():
    with pytest.raises(ConfigError, match="environment 'faulty' has 0 training tasks"):
        replace(faulty, num_tasks=lambda options: 0).sampler(FaultyOptions(), Split.TRAIN, 0)
