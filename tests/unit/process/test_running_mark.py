from __future__ import annotations

import asyncio
import os

import pytest

from agentrl.process.running_mark import RunningMark, make_mark, read_mark


@pytest.fixture
def descriptor():
    descriptor = make_mark()
    yield descriptor
    os.close(descriptor)


async def test_a_coroutine_is_marked_while_it_runs_and_not_while_it_waits(descriptor: int) -> None:
    mark, gate, seen = RunningMark(descriptor), asyncio.Event(), []

    async def work() -> int:
        seen.append(read_mark(descriptor))
        await gate.wait()
        seen.append(read_mark(descriptor))
        await asyncio.sleep(0)
        return 7

    async def play() -> int:
        return await mark.around("train-000007-1", work())

    playing = asyncio.create_task(play())
    await asyncio.sleep(0)
    assert (seen, read_mark(descriptor)) == (["train-000007-1"], None)
    gate.set()
    assert await playing == 7
    assert (seen, read_mark(descriptor)) == (["train-000007-1"] * 2, None)


async def test_what_it_raises_and_its_cancellation_pass(descriptor: int) -> None:
    mark, cleaned = RunningMark(descriptor), []

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("seven")

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(read_mark(descriptor))

    with pytest.raises(ValueError, match="seven"):
        await mark.around("a", fail())
    async with asyncio.timeout(5):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await mark.around("b", wait())
    assert (cleaned, read_mark(descriptor)) == (["b"], None)


def test_the_mark_of_a_process_that_died_stays(descriptor: int) -> None:
    child = os.fork()
    if child == 0:

        async def die() -> None:
            os._exit(3)

        async def main() -> None:
            await RunningMark(descriptor).around("train-000001-0", die())

        asyncio.run(main())
    os.waitpid(child, 0)
    assert read_mark(descriptor) == "train-000001-0"
