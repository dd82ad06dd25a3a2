from __future__ import annotations

import asyncio
import time

import pytest

from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.table import UNKNOWN_S, SandboxTable
from agentrl.testing.places import ScriptedBackend
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.sandbox import Command, Guarantee, SandboxSpec

SPEC = SandboxSpec(processes=8)
OTHER = SandboxSpec(processes=9)


def table(backend: ScriptedBackend, **settings: object) -> SandboxTable:
    return SandboxTable(backend, SandboxConfig.model_validate({"warm": 0, **settings}))


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def failure(opening: object) -> tuple[Boundary, str, str]:
    with pytest.raises(EpisodeError) as caught:
        await opening  # type: ignore[misc]
    return caught.value.failure.boundary, caught.value.failure.kind, caught.value.failure.message


async def test_what_a_backend_does_not_enforce_is_refused_by_name() -> None:
    backend = ScriptedBackend(frozenset(Guarantee) - {Guarantee.MEMORY}, {Guarantee.MEMORY: "there are no groups here"})
    where, kind, message = await failure(table(backend).open(SandboxSpec(memory_bytes=1), None, None))
    assert (where, kind) == (Boundary.SANDBOX, "guarantee")
    assert "memory: there are no groups here" in message
    assert not backend.made
    assert await table(backend).open(SPEC, None, None)


async def test_a_task_asks_for_isolation_unless_it_says_otherwise() -> None:
    nothing = ScriptedBackend(frozenset())
    assert (await failure(table(nothing).open(SandboxSpec(), None, None)))[1] == "guarantee"
    assert await table(nothing).open(SandboxSpec(needs=frozenset()), None, None)


async def test_one_more_than_there_may_be_waits_for_the_end_of_another() -> None:
    sandboxes = table(ScriptedBackend(), most=2)
    first, _ = await sandboxes.open(SPEC, None, None), await sandboxes.open(SPEC, None, None)
    third = asyncio.create_task(sandboxes.open(SPEC, None, None))
    await settled()
    assert not third.done()
    await sandboxes.end(first)
    assert await asyncio.wait_for(third, 60)
    assert len(sandboxes) == 2


async def test_who_waits_too_long_for_room_fails_as_a_timeout() -> None:
    sandboxes = table(ScriptedBackend(), most=1, open_s=0.01)
    await sandboxes.open(SPEC, None, None)
    assert (await failure(sandboxes.open(SPEC, None, None)))[:2] == (Boundary.TIMEOUT, "sandbox.open")


async def test_all_who_have_one_get_a_second_at_once() -> None:
    sandboxes = table(ScriptedBackend(), most=2)
    holders = [await sandboxes.open(SPEC, None, None) for _ in range(2)]
    seconds = [await asyncio.wait_for(sandboxes.open(SPEC, None, holder.handle), 60) for holder in holders]
    assert len(sandboxes) == 4
    for second in seconds:
        await sandboxes.end(second)
    assert await asyncio.wait_for(sandboxes.open(SPEC, None, holders[0].handle), 60)


async def test_a_greater_token_takes_over_and_a_smaller_one_is_refused() -> None:
    sandboxes = table(ScriptedBackend())
    kept = await sandboxes.open(SPEC, None, None)
    assert sandboxes.attach(kept.handle, 3) is kept
    kept.check(3)
    for token in (0, 2):
        with pytest.raises(EpisodeError, match="fenced"):
            kept.check(token)
        with pytest.raises(EpisodeError, match="fenced"):
            sandboxes.attach(kept.handle, token)
    assert sandboxes.attach(kept.handle, 3) is kept
    with pytest.raises(EpisodeError, match="lost"):
        sandboxes.attach("another", 4)


async def test_a_sandbox_that_nobody_uses_ends_and_one_in_use_does_not() -> None:
    backend = ScriptedBackend()
    sandboxes = table(backend, abandoned_s=1e-9)
    used, left = await sandboxes.open(SPEC, None, None), await sandboxes.open(SPEC, None, None)
    used.users = 1
    await sandboxes.end_abandoned()
    assert (backend.made[0].is_closed, backend.made[1].is_closed) == (False, True)
    assert left.handle != used.handle
    assert len(sandboxes) == 1
    assert (sandboxes.counts["opened"], sandboxes.counts["abandoned"]) == (2, 1)


async def test_a_sandbox_whose_handle_nobody_knows_does_not_wait_for_others() -> None:
    backend = ScriptedBackend()
    sandboxes = table(backend, abandoned_s=1e9)
    known, unknown = await sandboxes.open(SPEC, None, None), await sandboxes.open(SPEC, None, None)
    known.is_kept = True
    for kept in (known, unknown):
        kept.left = time.monotonic() - UNKNOWN_S / 2
    await sandboxes.end_abandoned()
    assert len(sandboxes) == 2
    for kept in (known, unknown):
        kept.left -= UNKNOWN_S
    await sandboxes.end_abandoned()
    assert [place.is_closed for place in backend.made] == [False, True]


async def test_one_that_somebody_comes_back_to_while_another_is_ended_lives_on() -> None:
    backend = ScriptedBackend()
    sandboxes = table(backend, abandoned_s=1e-9)
    first, second = await sandboxes.open(SPEC, None, None), await sandboxes.open(SPEC, None, None)

    async def come_back() -> None:
        sandboxes.attach(second.handle, 1).users += 1

    first.effects.end = come_back  # type: ignore[method-assign]
    await sandboxes.end_abandoned()
    assert [place.is_closed for place in backend.made] == [True, False]


async def test_the_end_of_a_sandbox_kills_its_command() -> None:
    backend = ScriptedBackend()
    sandboxes = table(backend)
    kept = await sandboxes.open(SPEC, None, None)
    running = asyncio.create_task(kept.effects.run("a", Command(("hang",), timeout_s=600)))
    await backend.made[0].hanging.wait()
    await sandboxes.close()
    assert (backend.made[0].killed, backend.made[0].is_closed) == (1, True)
    with pytest.raises(EpisodeError, match="ended"):
        await running


async def test_fresh_places_are_made_ahead_for_the_specs_that_are_asked_for() -> None:
    backend = ScriptedBackend()
    sandboxes = table(backend, warm=2)
    await sandboxes.open(SPEC, None, None)
    await settled()
    made = len(backend.made)
    assert made == 3, "one was asked for, and two are made ahead"
    kept = await sandboxes.open(SPEC, None, None)
    assert kept.place in backend.made[:made], "a place that was ready was not used"
    await settled()
    assert len(backend.made) == 4, "the one that was used is made anew"
    await sandboxes.open(OTHER, None, None)
    await settled()
    specs = [place.spec for place in backend.made if not place.is_closed]
    assert len(specs) == 3 + 2, "more wait than may"
    assert OTHER in specs[3:], "the spec that was asked for last has none ready"
    await sandboxes.close()
    assert all(place.is_closed for place in backend.made)
