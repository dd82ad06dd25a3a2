from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from agentrl.buffer.config import BufferConfig
from agentrl.buffer.episode_buffer import BufferTerms, EnvironmentTerms, MemoryBuffer
from agentrl.buffer.frontier import FrontierState
from agentrl.buffer.ledger import Ledger, LedgerLine
from agentrl.buffer.mix import Mix
from agentrl.buffer.order import in_turn
from agentrl.buffer.tasks import TaskFeed
from agentrl.envs.epochs import place_in_list
from agentrl.testing.builders import InstantTasks, build_episode
from agentrl.testing.clock import run_virtual
from agentrl.types.batch import TrainBatch
from agentrl.types.episode import Episode, Ticket
from agentrl.types.errors import Boundary, Failure, StalledError
from agentrl.types.task import Split, Task
from agentrl.types.version import PolicyVersion

GONE = Failure(Boundary.ENVIRONMENT, "crashed", "the site is down")
STEP = {"group_size": 2, "groups_per_step": 4, "stall_s": 3000.0}
WEIGHTS = st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.2, 1.0, 1.5, 3.0]), min_size=2)


@dataclass
class Played:
    """A run of one policy on a virtual clock, and what came of it."""

    weights: Mapping[str, float]
    config: BufferConfig
    seconds: Mapping[str, float] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()
    rewards: Callable[[Ticket], float] = lambda ticket: float(ticket.member)
    tasks: Any = None
    max_failures: int = 1_000_000
    places: int = 16
    first_step: int = 0
    frontiers: Mapping[str, FrontierState] = field(default_factory=dict)
    lines: list[LedgerLine] = field(default_factory=list)
    taken: list[TrainBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        terms = BufferTerms(
            configs={"main": self.config},
            environments={name: EnvironmentTerms(weight, ("main",)) for name, weight in self.weights.items()},
            versions={"main": PolicyVersion(0, self.first_step)},
            seed=0,
            places=self.places,
            max_attempts=1,
            max_consecutive_failures=self.max_failures,
        )
        tasks = self.tasks or InstantTasks(lambda ordinal: Task("fake", Split.TRAIN, ordinal))
        self.buffer = MemoryBuffer(terms, tasks, self.frontiers, Ledger(self.lines.append))

    async def run(self, num_steps: int, step_s: float = 1.0) -> None:
        """Steps of a second each, over episodes that take the seconds of their environment."""
        producing = asyncio.create_task(self._produce())
        try:
            for step in range(self.first_step, self.first_step + num_steps):
                version = PolicyVersion(0, step)
                self.taken.append(await self.buffer.take("main", version))
                await asyncio.sleep(step_s)
                await self.buffer.trained("main", version.next())
                await self.buffer.loaded("main", version.next())
        finally:
            producing.cancel()
            await asyncio.gather(producing, return_exceptions=True)

    async def _produce(self) -> None:
        async with asyncio.TaskGroup() as episodes:
            while True:
                episodes.create_task(self._play(await self.buffer.admit()))

    async def _play(self, ticket: Ticket) -> None:
        seconds = self.seconds.get(ticket.environment, 1.0)
        await asyncio.sleep(seconds * (1 + (7 * ticket.group + 3 * ticket.member) % 5))
        await self.buffer.settle(self._end(ticket))

    def _end(self, ticket: Ticket) -> Episode:
        if ticket.environment in self.broken:
            return replace(build_episode(ticket, [(1, 0)], None), failure=GONE, stop_reason=None)
        return build_episode(ticket, [(2, ticket.started_at["main"].step)], self.rewards(ticket))

    def environments(self) -> list[str]:
        """Of every trained group, step by step."""
        mix = Mix(self.weights)
        numbers = [{int(e.episode_id.split("-")[1]) for e in batch.episodes} for batch in self.taken]
        return [mix.of(number)[0] for of_step in numbers for number in sorted(of_step)]


def shares(count: Counter[str]) -> dict[str, float]:
    return {name: number / count.total() for name, number in sorted(count.items())}


def turns_of(weights: Mapping[str, float], count: int) -> Counter[str]:
    mix = Mix(weights)
    return Counter(mix.of(number)[0] for number in range(count))


@given(WEIGHTS, st.integers(1, 200))
def test_no_stretch_of_the_mix_is_a_whole_group_short_of_a_share(weights, count):
    counts, total = turns_of(weights, count), sum(weights.values())
    for name, weight in weights.items():
        assert abs(counts[name] - count * weight / total) <= (1 if len(weights) < 3 else 1.5)


@given(WEIGHTS, st.integers(0, 100))
def test_a_groups_number_and_its_place_in_its_environment_lead_to_each_other(weights, number):
    mix = Mix(weights)
    assert Mix(weights).number(*mix.of(number)) == number


def test_an_environment_whose_turn_it_is_is_waited_for_if_something_of_it_will_come():
    number = Mix({"a": 1, "b": 1}).number
    assert in_turn({"a": [0, 2]}, {"b"}, {"a": 0, "b": 0}, number, 2) == [0]
    assert in_turn({"a": [0, 2], "b": [1]}, {"b"}, {"a": 0, "b": 0}, number, 2) == [0, 1]
    assert in_turn({"a": [0, 2]}, set(), {"a": 0, "b": 0}, number, 2) == [0, 2]
    assert in_turn({"a": [0, 2]}, {"b"}, {"a": 0, "b": 1}, number, 2) == [0, 2], "a dropped group had its turn"


@given(
    weights=WEIGHTS,
    seconds=st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.1, 1.0, 10.0])),
    staleness=st.integers(0, 4),
    policy=st.sampled_from(["mask_spans", "wait", "withhold"]),
    window=st.sampled_from([None, 4, 9]),
)
def test_every_step_has_the_declared_mix_however_slow_an_environment_is(weights, seconds, staleness, policy, window):
    config = BufferConfig(**STEP, max_staleness=staleness, staleness=policy, order_window=window)
    played = Played(weights, config, seconds)
    run_virtual(played.run(8))
    trained = played.environments()
    for step in range(1, 9):
        assert Counter(trained[: 4 * step]) == turns_of(weights, 4 * step)


def test_by_groups_and_by_episodes_the_trained_shares_are_the_declared_ones_with_one_ten_times_slower():
    weights = {"quick": 2.0, "slow": 1.0, "rare": 1.0}
    played = Played(weights, BufferConfig(**STEP), {"slow": 10.0})
    run_virtual(played.run(50))
    assert shares(Counter(played.environments())) == {"quick": 0.5, "rare": 0.25, "slow": 0.25}
    assert shares(Counter(line.environment for line in played.lines if line.outcome == "trained")) == {
        "quick": 0.5,
        "rare": 0.25,
        "slow": 0.25,
    }


def seconds_of(num_steps: int, **options: Any) -> float:
    async def timed() -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await Played(config=BufferConfig(**STEP), **options).run(num_steps)
        return loop.time() - started

    return run_virtual(timed())


def test_a_slow_environment_costs_the_others_its_share_of_the_places_and_no_more():
    """Of 16 places the 8 that slow episodes need on average leave enough: 4 of a step's 8 episodes, 30 s each."""
    alone_s = seconds_of(40, weights={"quick": 1.0, "slow": 1.0}, places=64)
    with_slow_s = seconds_of(40, weights={"quick": 1.0, "slow": 1.0}, seconds={"slow": 10.0}, places=64)
    longest_episode_s = 50.0
    assert with_slow_s < alone_s + 40 * longest_episode_s / 5, "five steps' episodes are in flight at once"


def test_a_broken_environment_keeps_its_share_of_the_groups_and_the_others_go_on_as_without_it(caplog):
    weights = {"a": 2.0, "bad": 1.0, "c": 1.0}
    played = Played(weights, BufferConfig(**STEP), broken=frozenset({"bad"}), max_failures=10)
    with caplog.at_level(logging.WARNING):
        run_virtual(played.run(30))
    trained = Counter(played.environments())
    assert trained["bad"] == 0
    assert abs(trained["a"] - 2 * trained["c"]) <= 2
    begun = Counter(line.environment for line in played.lines)
    assert abs(begun["bad"] - begun["a"] / 2) <= 8
    [message] = caplog.messages
    assert message.startswith("environment 'bad': 10 episodes failed in a row; the last: environment(crashed): the")


def test_an_environment_that_works_again_and_fails_again_is_named_again(caplog):
    played = Played({"a": 1.0, "b": 1.0}, BufferConfig(**STEP), max_failures=4)

    async def settle(num_groups: int, broken: str) -> None:
        played.broken = frozenset(broken)
        for ticket in [await played.buffer.admit() for _ in range(2 * num_groups)]:
            await played.buffer.settle(played._end(ticket))

    async def run() -> None:
        await settle(6, "b")
        await settle(2, "")
        await settle(6, "b")

    run_virtual(run())
    assert [message.split(":")[0] for message in caplog.messages] == ["environment 'b'"] * 2


def test_a_run_of_which_every_environment_is_broken_ends_and_names_each():
    played = Played({"a": 1.0, "b": 3.0}, BufferConfig(**STEP), broken=frozenset("ab"), max_failures=6)
    with pytest.raises(StalledError, match=r"episodes \(6 of 'a', \d+ of 'b'\) failed in a row; .* the site is down"):
        run_virtual(played.run(1))


def test_a_step_that_waits_in_vain_names_the_environment_that_it_waits_for():
    config = BufferConfig(**{**STEP, "stall_s": 60.0})
    with pytest.raises(StalledError, match=r"turns: of 'quick' \d+ ready and \d+ incomplete, of 'slow' 0 ready and"):
        run_virtual(Played({"quick": 1.0, "slow": 1.0}, config, {"slow": 1000.0}).run(2))


@settings(phases=[Phase.generate, Phase.reuse, Phase.explicit])
@example({"b": 3.0, "c": 0.2}, {"b": 10.0}, "b", 2, "mask_spans", 9, 0.6686117457964308)
@given(
    weights=WEIGHTS,
    seconds=st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.1, 1.0, 10.0])),
    broken=st.sampled_from(["", "a", "b"]),
    staleness=st.integers(0, 3),
    policy=st.sampled_from(["mask_spans", "wait"]),
    window=st.sampled_from([None, 4, 9]),
    filtered=st.floats(0.0, 0.7),
)
def test_no_take_waits_for_ever_whatever_is_slow_broken_or_filtered(
    weights, seconds, broken, staleness, policy, window, filtered
):
    if set(weights) <= set(broken):
        return
    options = {"staleness": policy, "order_window": window, "group_filter": "spread", "max_filtered_groups": 10_000}
    # One of sixteen groups may be of an environment that is not broken, of which the filter leaves a third.
    config = BufferConfig(**{**STEP, "stall_s": 300_000.0}, max_staleness=staleness, **options)

    def reward(ticket: Ticket) -> float:
        return 1.0 if random.Random(ticket.group).random() < filtered else float(ticket.member)

    played = Played(weights, config, seconds, frozenset(broken), reward, places=5)
    try:
        run_virtual(played.run(6))
    except StalledError as error:
        raise AssertionError from error


def test_tasks_that_come_late_are_waited_for_and_the_mix_stays_what_it_is():
    """A sampler that gives four tasks in ten seconds is slower than the steps, which need two a second."""

    async def sample_late(ordinals: Sequence[int]) -> list[Task]:
        await asyncio.sleep(10.0)
        return [Task("late", Split.TRAIN, ordinal) for ordinal in ordinals]

    async def sample(ordinals: Sequence[int]) -> list[Task]:
        return [Task("a", Split.TRAIN, ordinal) for ordinal in ordinals]

    async def run() -> Played:
        feed = TaskFeed({"a": sample, "late": sample_late}, ahead=4)
        feeding = asyncio.create_task(feed.run())
        played = Played({"a": 1.0, "late": 1.0}, BufferConfig(**STEP), tasks=feed)
        await played.run(30)
        feeding.cancel()
        return played

    assert Counter(run_virtual(run()).environments()) == {"a": 60, "late": 60}


def test_a_resumed_run_goes_on_with_mix_and_epochs_of_each_environment_where_its_checkpoint_was():
    """Without a journal what was in flight comes again; lists of 5 and 3 tasks, stops in the middle of epochs."""
    sizes, weights = {"five": 5, "three": 3}, {"five": 2.0, "three": 1.0}
    frontiers: Mapping[str, FrontierState] = {}
    lines, trained = [], []
    for first_step in range(0, 18, 3):
        played = Played(
            weights, BufferConfig(**STEP), {"three": 10.0}, first_step=first_step, frontiers=frontiers, lines=lines
        )
        run_virtual(played.run(3))
        trained += played.environments()
        frontiers = played.buffer.frontiers({"main": first_step + 3})
        assert abs(Counter(trained)["three"] - len(trained) / 3) < 1
    mix = Mix(weights)
    ordinals: dict[str, list[int]] = {"five": [], "three": []}
    for line in lines:
        if line.member == 0 and line.outcome == "trained":
            environment, ordinal = mix.of(line.group)
            ordinals[environment].append(ordinal)
    for environment, of_environment in ordinals.items():
        size = sizes[environment]
        assert len(of_environment) == len(set(of_environment)), "a task came twice"
        whole = min(set(range(200)) - set(of_environment)) // size
        assert whole >= 6
        for epoch in range(whole):
            places = [place_in_list(n, size, 1) for n in sorted(of_environment) if n // size == epoch]
            assert sorted(places) == list(range(size))
