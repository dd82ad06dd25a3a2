"""Live sessions end with the run that ends for good, stay where it stops, and judge once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dying_worker import NAME, DyingWriter, Place
from rollout_parts import nothing

from agentrl import codec
from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.hosting import build_host
from agentrl.envs.process import ProcessHost
from agentrl.journal.entries import Ended, EnvironmentStarted, Judging, Scored
from agentrl.journal.history import build_history
from agentrl.rollouts.environment_recovery import end_session
from agentrl.testing.builders import build_ticket
from agentrl.testing.durable_environments import LastingOptions, SessionServer, SessionState, enduring
from agentrl.testing.sole_holder import SoleHolder
from tests.unit.rollouts.lingering_sessions import Lingering, asked, lingering

LIMIT_S = 120.0
BEHIND_JUDGING, BEHIND_SCORE = 12, 13
LINGERING = "tests.unit.rollouts.lingering_sessions:lingering"


async def apart(folder: Path) -> ProcessHost:
    """A host whose environments are in processes."""
    config = EnvironmentConfig(name=LINGERING, options={"folder": str(folder)})
    host = await build_host(config, LIMIT_S, folder)
    assert isinstance(host, ProcessHost)
    return host


async def cut_off_in(call: str, chat: Any, place: Place, host: ProcessHost, writer: DyingWriter, is_over: bool) -> None:
    """Cut an episode off while a call into its environment is under way, which then ends."""
    held = place.folder / f"hold {call}"
    held.touch()
    journal = SoleHolder(writer)
    runner = place.runner(chat, host, journal)
    playing = asyncio.create_task(runner.run(runner.open(build_ticket()), nothing))
    async with asyncio.timeout(LIMIT_S):
        while not (place.folder / f"in {call}").exists():
            await asyncio.sleep(0.01)
        if is_over:
            journal.end()
        playing.cancel()
        await asyncio.sleep(0)
        held.unlink()
        with suppress(asyncio.CancelledError):
            await playing


@pytest.mark.parametrize("call", ["start", "step"])
async def test_a_session_ends_with_an_episode_that_is_cut_off_for_good(chat: Any, tmp_path: Path, call: str) -> None:
    place, host = Place(tmp_path, lingering), await apart(tmp_path)
    try:
        await cut_off_in(call, chat, place, host, DyingWriter(), is_over=True)
        assert place.server.begun() == ["session-1"]
        assert place.server.alive() == []
        assert [worker.is_alive for worker in host._idle] == [True], "its worker has answered all calls and serves on"
    finally:
        await host.close()


async def test_a_session_in_the_midst_of_a_step_outlives_the_episode_that_is_to_go_on(
    chat: Any, tmp_path: Path
) -> None:
    place, host, writer = Place(tmp_path, lingering), await apart(tmp_path), DyingWriter()
    try:
        await cut_off_in("step", chat, place, host, writer, is_over=False)
        assert place.server.alive() == ["session-1"]
        assert [worker.is_alive for worker in host._idle] == [True], "no answer was taken for that to another call"
        history = build_history(writer.entries)
        runner = place.runner(chat, host, SoleHolder(DyingWriter(), 2, {NAME: history}))
        episode = await runner.run(runner.open(build_ticket()), nothing)
    finally:
        await host.close()
    assert (episode.failure, episode.metrics) == (None, {"steps": 3.0})
    assert place.server.effects() == [f"session-1 {NAME}/0.0", f"session-1 {NAME}/1.0", "session-1"], "each step once"
    assert (place.server.begun(), place.server.alive()) == (["session-1"], [])


async def test_a_session_whose_name_is_not_on_record_ends_with_its_episode(chat: Any, tmp_path: Path) -> None:
    place, host, writer = Place(tmp_path, lingering), await apart(tmp_path), DyingWriter()
    try:
        await cut_off_in("start", chat, place, host, writer, is_over=False)
    finally:
        await host.close()
    assert not [entry for entry in writer.entries if isinstance(entry, EnvironmentStarted)]
    assert (place.server.begun(), place.server.alive()) == (["session-1"], [])


@pytest.mark.parametrize("was_asked", [False, True])
async def test_a_session_that_may_have_judged_is_not_asked_again(chat: Any, tmp_path: Path, was_asked: bool) -> None:
    place = Place(tmp_path, lingering)
    history = await place.cut(chat, BEHIND_JUDGING, is_at_once=not was_asked)
    assert isinstance(history.entries[-1], Judging)
    assert asked(tmp_path) == ["session-1"] * was_asked
    episode = await place.play(chat, DyingWriter(), history, token=2)
    assert str(episode.failure) == (
        "environment(verdict_unknown): session session-1 was to judge the episode, its verdict is not on record, and "
        "no session is asked twice"
    )
    assert (episode.reward, asked(tmp_path)) == (None, ["session-1"] * was_asked)
    assert place.server.alive() == [], "nobody goes on in it"


async def test_where_a_verdict_is_lost_another_way_to_the_state_gives_one(chat: Any, tmp_path: Path) -> None:
    class Asked(Lingering):
        voice = "any"
        snapshot = enduring_snapshot

        @classmethod
        def restored(cls, options: LastingOptions, snapshot: bytes) -> Asked:
            return cls(options, enduring_session(options, snapshot))

    definition = replace(
        enduring,
        create=lambda options, task: Asked(options),
        reattach=lambda options, task, handle: Asked(options, handle),
        restore=lambda options, task, snapshot: Asked.restored(options, snapshot),
    )
    place = Place(tmp_path, definition)
    history = await place.cut(chat, BEHIND_JUDGING, is_at_once=False)
    writer = DyingWriter()
    episode = await place.play(chat, writer, history, token=2)
    assert (episode.failure, episode.metrics) == (None, {"steps": 3.0})
    assert asked(tmp_path) == ["session-1", "session-2"]
    assert place.server.alive() == []
    kinds = [type(entry) for entry in writer.entries]
    assert kinds[-3:] == [Judging, Scored, Ended], "the second session is asked no more often than the first"


async def test_a_verdict_on_record_is_the_verdict(chat: Any, tmp_path: Path) -> None:
    place = Place(tmp_path, lingering)
    history = await place.cut(chat, BEHIND_SCORE, is_at_once=True)
    writer = DyingWriter()
    episode = await place.play(chat, writer, history, token=2)
    assert (episode.failure, episode.reward, asked(tmp_path)) == (None, 1.0, ["session-1"])
    assert not [entry for entry in writer.entries if isinstance(entry, Judging | Scored)]
    assert place.server.alive() == []


async def enduring_snapshot(self: Any) -> bytes:
    """The session's whole state."""
    return codec.to_json(self._find())


def enduring_session(options: LastingOptions, snapshot: bytes) -> str:
    """A new session with the state of another."""
    server = SessionServer(options.folder)
    begun = server.begin("any")
    server.keep(replace(codec.from_json(snapshot, SessionState), name=begun.name, token=0))
    return begun.name


async def test_a_session_that_nobody_goes_on_in_is_ended_by_its_name(chat: Any, tmp_path: Path, caplog: Any) -> None:
    place = Place(tmp_path, lingering)
    place.server.begin()
    async with place.host() as host:
        for _ in range(2):
            await end_session(host, build_ticket().task, "session-1", 7)
    assert (place.server.alive(), caplog.text) == ([], ""), "the second time it is gone, which is no error"
