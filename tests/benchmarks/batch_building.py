"""How long building, encoding and sending a batch keep the event loop that plays episodes from them.

The real buffer takes batches of 64 finished episodes of 4,000 tokens in 20 turns, and the real handle sends each to two
trainer ranks, processes that decode it. Beside that the loop wakes every two milliseconds, as if to play.

Figures: `loop_ms_p99` and `loop_ms_max`, processor time of the loop's thread for a batch, all callbacks from the take
to the ranks' answers together; `callback_ms_max`, of a single callback; `thread_ms`, median processor time of the
other threads for a batch; `loop_delay_ms_p99` and `loop_delay_ms_max`, by how much the loop woke too late while a batch
was built, encoded and sent, since threads of a process also wait for each other; `idle_delay_ms_p99` at other times.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from agentrl.buffer.config import BufferConfig
from agentrl.buffer.episode_buffer import BufferTerms, EnvironmentTerms, MemoryBuffer
from agentrl.buffer.ledger import Ledger
from agentrl.process.remote import ChildProcess
from agentrl.process.server import serve
from agentrl.testing.builders import InstantTasks, build_episode
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.handle import TrainerHandle
from agentrl.types.batch import StepReport, TrainBatch
from agentrl.types.task import Split, Task
from agentrl.types.version import PolicyVersion
from tests.benchmarks.report import report

EPISODES, TOKENS, TURNS, RANKS = 64, 4000, 20, 2
GROUP = 8
AHEAD = 4  # batches that are ready, as with max_staleness 4
TICK_S = 0.002
FIRST = PolicyVersion(0, 0)


class IdleRank:
    """Takes a batch in, and learns nothing from it."""

    def step(self, batch: TrainBatch, is_redo: bool) -> StepReport:
        return StepReport(batch.version.next(), {"batch/episodes": float(len(batch.episodes))})


class LoopTimes:
    """Processor time of the callbacks of an event loop, but for its own, and how late the loop wakes."""

    def __init__(self) -> None:
        self.callbacks_s: list[float] = []
        self.delays_s: list[float] = []
        self._loop = asyncio.get_running_loop()

    def watch(self) -> None:
        """From here on; of the running loop, which must be asyncio's own."""
        run = asyncio.Handle._run
        times = self.callbacks_s

        def timed(handle: asyncio.Handle) -> None:
            started = time.thread_time()
            run(handle)
            if not isinstance(handle, asyncio.TimerHandle):
                times.append(time.thread_time() - started)

        asyncio.Handle._run = timed  # type: ignore[method-assign]
        self._tick(self._loop.time())

    def _tick(self, due: float) -> None:
        self.delays_s.append(self._loop.time() - due)
        due = self._loop.time() + TICK_S
        self._loop.call_at(due, self._tick, due)

    def clear(self) -> None:
        """Forget what was seen."""
        self.callbacks_s.clear()
        self.delays_s.clear()


def make_buffer() -> MemoryBuffer:
    config = BufferConfig(group_size=GROUP, groups_per_step=EPISODES // GROUP, max_staleness="unbounded")
    terms = BufferTerms(
        {"main": config}, {"fake": EnvironmentTerms(1.0, ("main",))}, {"main": FIRST}, 0, EPISODES, 1, 1
    )
    tasks = InstantTasks(lambda ordinal: Task("fake", Split.TRAIN, ordinal))
    return MemoryBuffer(terms, tasks, {}, Ledger(lambda line: None))


async def finish_batch(buffer: MemoryBuffer, step: int) -> None:
    """Let as many episodes end as make a step."""
    reply = TOKENS // TURNS - 2  # two tokens of context lie between replies
    for _ in range(EPISODES):
        ticket = await buffer.admit()
        episode = build_episode(ticket, [(reply, step)] * TURNS, float(ticket.member % 2), prompt_tokens=2)
        await buffer.settle(episode)


async def measure(num_batches: int, folder: Path) -> dict[str, object]:
    argv = ["-m", "tests.benchmarks.batch_building", "rank"]
    ranks = [await ChildProcess.start(f"rank-{n}", argv, folder / f"{n}.log") for n in range(RANKS)]
    trainer = TrainerHandle("main", TrainerConfig(), ranks, folder / "rendezvous")
    warm_up, buffer = 3, make_buffer()
    for _ in range(AHEAD):
        await finish_batch(buffer, 0)
    times = LoopTimes()
    times.watch()
    loop_ms, thread_ms, longest_ms, delays_ms, idle_ms = [], [], [], [], []
    tokens = 0
    for number in range(num_batches + warm_up):
        version = PolicyVersion(0, number)
        await finish_batch(buffer, number)
        times.clear()
        await asyncio.sleep(0.1)
        idle_ms += [1000 * delay for delay in times.delays_s]
        times.clear()
        processor_s, own_s = time.process_time(), time.thread_time()
        batch = await buffer.take("main", version)
        await trainer.step(batch)
        processor_s, own_s = time.process_time() - processor_s, time.thread_time() - own_s
        if number >= warm_up:
            loop_ms.append(1000 * sum(times.callbacks_s))
            longest_ms.append(1000 * max(times.callbacks_s))
            thread_ms.append(1000 * (processor_s - own_s))
            delays_ms += [1000 * delay for delay in times.delays_s]
        tokens = sum(len(t.trajectory.token_ids) for e in batch.episodes for t in e.trajectories)
        times.clear()
        await buffer.trained("main", version.next())
    await trainer.close()
    percentile: Callable[[list[float]], float] = functools.partial(np.percentile, q=99)
    return {
        "loop_ms_p99": round(float(percentile(loop_ms)), 3),
        "loop_ms_max": round(max(loop_ms), 3),
        "callback_ms_max": round(max(longest_ms), 3),
        "thread_ms": round(statistics.median(thread_ms), 1),
        "loop_delay_ms_p99": round(float(percentile(delays_ms)), 2),
        "loop_delay_ms_max": round(max(delays_ms), 2),
        "idle_delay_ms_p99": round(float(percentile(idle_ms)), 2),
        "tokens": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=100)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(arguments.batches, Path(folder)))
    report("batch_building", **figures, episodes=EPISODES, ranks=RANKS, batches=arguments.batches)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        serve(IdleRank(), int(sys.argv[2]))
    else:
        main()
