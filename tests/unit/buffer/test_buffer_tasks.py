from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from agentrl.buffer.config import BufferConfig
from agentrl.buffer.episode_buffer import BufferTerms, EnvironmentTerms, MemoryBuffer
from agentrl.buffer.ledger import Ledger
from agentrl.buffer.tasks import SampleTasks, TaskFeed
from agentrl.testing.clock import run_virtual
from agentrl.types.episode import Ticket
from agentrl.types.task import Split, Task
from agentrl.types.version import PolicyVersion

SLOW_S = 10.0


class Sampler:
    """Makes tasks of an environment and remembers when it was asked for which."""

    def __init__(self, name: str, seconds_a_task: float = 0.0) -> None:
        self._name, self._seconds_a_task = name, seconds_a_task
        self.asked: list[list[int]] = []

    async def __call__(self, ordinals: Sequence[int]) -> list[Task]:
        self.asked.append(list(ordinals))
        await asyncio.sleep(self._seconds_a_task * len(ordinals))
        return [Task(self._name, Split.TRAIN, ordinal) for ordinal in ordinals]


@asynccontextmanager
async def fed_buffer(samplers: Mapping[str, SampleTasks], places: int) -> AsyncIterator[MemoryBuffer]:
    """A buffer of one policy whose environments have equal weights."""
    feed = TaskFeed(samplers)
    first = PolicyVersion(0, 0)
    terms = BufferTerms(
        configs={"main": BufferConfig(group_size=1, groups_per_step=places)},
        environments={name: EnvironmentTerms(1.0, ("main",)) for name in samplers},
        versions={"main": first},
        seed=0,
        places=places,
        max_attempts=1,
        max_consecutive_failures=100,
    )
    buffer = MemoryBuffer(terms, feed, {}, Ledger(lambda line: None))
    sampling = asyncio.create_task(feed.run())
    yield buffer
    sampling.cancel()


def test_a_sampler_that_takes_ten_seconds_holds_up_no_tasks_of_another_environment():
    async def get() -> tuple[Task | None, Task | None, float]:
        feed = TaskFeed({"slow": Sampler("slow", SLOW_S), "fast": Sampler("fast")})
        arrived = asyncio.Event()

        async def on_arrival() -> None:
            arrived.set()

        feed.listen(on_arrival)
        sampling = asyncio.create_task(feed.run())
        assert (feed.get("slow", 0), feed.get("fast", 0)) == (None, None)
        await arrived.wait()
        found = (feed.get("slow", 0), feed.get("fast", 0), asyncio.get_running_loop().time())
        sampling.cancel()
        return found

    slow, fast, seconds = run_virtual(get())
    assert (slow, fast) == (None, Task("fast", Split.TRAIN, 0))
    assert seconds < SLOW_S / 100


def test_the_first_task_of_a_slow_sampler_does_not_wait_for_the_others():
    async def admit() -> tuple[Ticket, float]:
        async with fed_buffer({"slow": Sampler("slow", SLOW_S)}, 4) as buffer:
            return await buffer.admit(), asyncio.get_running_loop().time()

    ticket, seconds = run_virtual(admit())
    assert ticket.task.ordinal == 0
    assert SLOW_S <= seconds < SLOW_S + 1.0


def test_tasks_are_asked_for_in_order_once_each_and_ahead_of_admission():
    sampler = Sampler("fast")

    async def admit() -> list[int]:
        async with fed_buffer({"fast": sampler}, 40) as buffer:
            return [(await buffer.admit()).task.ordinal for _ in range(40)]

    assert run_virtual(admit()) == list(range(40))
    asked = [ordinal for part in sampler.asked for ordinal in part]
    assert asked == list(range(len(asked)))
    assert len(asked) >= 40 + 16
