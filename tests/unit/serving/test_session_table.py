"""Sessions of a server: each call acts once, for who holds the session, and every session ends."""

from __future__ import annotations

import asyncio

import pytest
from counting_host import TASK, Host, opened, table_of

from agentrl.envs.wire import Attach, Close, GiveScore, Open, Outcome, ServerBusyError, Snapshot, Start, Step
from agentrl.serving.board import Number
from agentrl.types.errors import EpisodeError
from agentrl.types.message import Message, Role, ToolCall

PATIENCE_S = 60.0


def step(session: str, text: str, name: str, token: int = 0) -> Step:
    call = ToolCall(f"call-{text}", "count")
    return Step(id=name, session=session, token=token, action=Message(Role.ASSISTANT, text, (call,)))


def kind_of(caught: pytest.ExceptionInfo[EpisodeError]) -> str:
    return caught.value.failure.kind


async def test_a_call_that_comes_again_under_its_id_gets_the_first_answer_and_acts_once() -> None:
    table = table_of(host := Host())
    session = await opened(table)
    first = await table.answer(step(session, "a", "1"))
    assert await table.answer(step(session, "a", "1")) == first
    assert host.made[0].effects == ["a"]
    assert table.board.total(Number.REPEATED) == 1


async def test_a_call_that_comes_again_while_it_is_under_way_waits_for_its_answer_and_acts_once() -> None:
    table = table_of(host := Host(waits=True))
    session = await opened(table)
    calls = [asyncio.create_task(table.answer(step(session, "a", "1"))) for _ in range(3)]
    while not host.made[0].effects:
        await asyncio.sleep(0)
    host.made[0].goes_on.set()
    assert {answer.messages[0].content for answer in await asyncio.gather(*calls)} == {"1: a"}
    assert host.made[0].effects == ["a"]


async def test_a_failure_is_an_answer_like_any_other() -> None:
    table = table_of(host := Host())
    session = await opened(table)
    for _ in range(2):
        with pytest.raises(EpisodeError, match=r"ValueError: no such move") as caught:
            await table.answer(step(session, "bad", "1"))
        assert kind_of(caught) == "step"
    with pytest.raises(EpisodeError, match=r"no such move"):
        await table.answer(Outcome(id="2", session=session, step=0, effect_ids=("call-bad",)))
    assert host.made[0].effects == ["bad"]


async def test_a_late_call_with_an_older_id_does_nothing() -> None:
    table = table_of(host := Host())
    session = await opened(table)
    await table.answer(step(session, "a", "1"))
    await table.answer(step(session, "b", "2"))
    with pytest.raises(EpisodeError) as caught:
        await table.answer(step(session, "a", "1"))
    assert kind_of(caught) == "repeated"
    assert host.made[0].effects == ["a", "b"]


async def test_who_held_a_session_before_is_refused_even_if_its_call_was_waiting() -> None:
    table = table_of(host := Host(waits=True))
    session = await opened(table, token=1)
    running = asyncio.create_task(table.answer(step(session, "a", "1", token=1)))
    waiting = asyncio.create_task(table.answer(step(session, "b", "2", token=1)))
    while not host.made[0].effects:
        await asyncio.sleep(0)
    attaching = asyncio.create_task(table.answer(Attach(id="3", session=session, token=2)))
    await asyncio.sleep(0)
    host.made[0].goes_on.set()
    await running
    await attaching
    with pytest.raises(EpisodeError, match=r"held under token 2, which is above 1") as caught:
        await waiting
    assert kind_of(caught) == "fenced"
    assert host.made[0].effects == ["a"]


async def test_the_new_holder_learns_what_became_of_the_last_step() -> None:
    table = table_of(Host())
    session = await opened(table)
    answer = await table.answer(step(session, "a", "1"))

    def outcome(name: str, number: int, *ids: str) -> Outcome:
        return Outcome(id=name, session=session, token=5, step=number, effect_ids=ids)

    assert await table.answer(outcome("2", 0, "call-a")) == answer
    assert await table.answer(outcome("3", 1, "call-b")) is None
    with pytest.raises(EpisodeError, match=r"not step 0 with calls \['call-z'\]"):
        await table.answer(outcome("4", 0, "call-z"))


async def test_an_outcome_waits_for_the_step_that_its_caller_does_not_know_of() -> None:
    table = table_of(host := Host(waits=True))
    session = await opened(table)
    running = asyncio.create_task(table.answer(step(session, "a", "1")))
    while not host.made[0].effects:
        await asyncio.sleep(0)
    asked = asyncio.create_task(table.answer(Outcome(id="2", session=session, token=1, step=0, effect_ids=("call-a",))))
    await asyncio.sleep(0)
    assert not asked.done()
    host.made[0].goes_on.set()
    assert await asked == await running


async def test_an_open_that_comes_again_gives_the_same_session() -> None:
    table = table_of(host := Host())
    assert await opened(table, "x") == await opened(table, "x") != await opened(table, "y")
    assert len(host.made) == 2


async def test_a_full_server_refuses_until_an_instance_is_freed() -> None:
    table = table_of(host := Host(), most=1)
    session = await opened(table, "x")
    with pytest.raises(ServerBusyError, match=r"1 sessions, the most that it takes") as caught:
        await opened(table, "y")
    assert caught.value.retry_after_s > 0
    await table.answer(Close(id="c", session=session))
    assert host.made[0].is_closed
    assert (await opened(table, "y"), table.free) != (session, 1)
    assert table.board.total(Number.REFUSED) == 1


async def test_a_session_that_is_gone_says_how_it_ended() -> None:
    table = table_of(Host())
    session = await opened(table)
    for name in ("c", "d"):
        await table.answer(Close(id=name, session=session))
    with pytest.raises(EpisodeError, match=r"it was closed") as caught:
        await table.answer(Start(id="s", session=session))
    assert kind_of(caught) == "lost"


async def test_a_call_that_takes_too_long_ends_its_session() -> None:
    table = table_of(host := Host(waits=True), call_s=0.01)
    session = await opened(table)
    with pytest.raises(EpisodeError, match=r"environment.step.*within 0.01 s"):
        await table.answer(step(session, "a", "1"))
    assert host.made[0].is_closed
    with pytest.raises(EpisodeError, match=r"its step was not done within 0.01 s"):
        await table.answer(GiveScore(id="2", session=session))
    assert table.free == table.limits.most


@pytest.mark.parametrize(
    ("limits", "number", "says"),
    [
        ({"idle_s": -1.0}, Number.REAPED, "nobody used it"),
        ({"session_s": -1.0}, Number.EXPIRED, "the most that the server allows"),
    ],
)
async def test_sessions_that_nobody_uses_or_that_are_too_old_end(limits, number: Number, says: str) -> None:
    table = table_of(host := Host(), **limits)
    session = await opened(table)
    await table.reap()
    async with asyncio.timeout(PATIENCE_S):
        while not host.made[0].is_closed:
            await asyncio.sleep(0)
    assert table.board.total(number) == 1
    with pytest.raises(EpisodeError, match=says):
        await table.answer(Start(id="s", session=session))


async def test_a_session_whose_call_is_under_way_is_not_idle() -> None:
    table = table_of(host := Host(waits=True), idle_s=-1.0)
    session = await opened(table)
    running = asyncio.create_task(table.answer(step(session, "a", "1")))
    while not host.made[0].effects:
        await asyncio.sleep(0)
    await table.reap()
    host.made[0].goes_on.set()
    assert (await running).messages[0].content == "1: a"
    assert table.board.total(Number.REAPED) == 0


async def test_state_is_given_away_and_a_session_is_made_from_it() -> None:
    table = table_of(host := Host())
    session = await opened(table)
    await table.answer(step(session, "a", "1"))
    state = await table.answer(Snapshot(id="2", session=session))
    await table.answer(Open(id="3", environment="counting", task=TASK, snapshot=state))
    assert host.made[1].restored == b"a"


async def test_closing_the_table_frees_every_instance() -> None:
    table = table_of(host := Host())
    for name in "abc":
        await opened(table, name)
    await table.close()
    assert [environment.is_closed for environment in host.made] == [True] * 3
    assert table.board.total(Number.SESSIONS) == 0
