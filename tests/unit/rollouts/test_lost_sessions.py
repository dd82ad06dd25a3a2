from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dying_worker import NAME, DyingWriter, Place, WorkerDied, park, results_of

from agentrl.journal.entries import EnvironmentStarted
from agentrl.journal.history import EpisodeHistory, build_history
from agentrl.testing.durable_environments import enduring, living
from agentrl.types.episode import Episode
from agentrl.types.errors import Boundary, EpisodeError

CALLS = [f"{NAME}/0.0", f"{NAME}/1.0", ""]
EXTERNAL = {"external_tools": frozenset({"query"})}
BEHIND_A_RESULT, BEHIND_AN_INTENT = 5, 7  # of the first call, and of the second


def made(session: str, *steps: int) -> list[str]:
    return [f"{session} {CALLS[step]}".rstrip() for step in steps]


def unrestorable(options: Any, task: Any, snapshot: bytes) -> Any:
    raise OSError("the image is gone")


async def lose(chat: Any, place: Place, num_entries: int) -> EpisodeHistory:
    """What is on record of a worker that died together with its session."""
    history = await place.cut(chat, num_entries, is_at_once=True)
    place.server.end("session-1")
    return history


def check_as_if_never_lost(episode: Episode) -> None:
    assert (episode.failure, episode.reward) == (None, 1.0)
    assert results_of(episode) == ["any call 1", "any call 2"]


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("num_entries", [BEHIND_A_RESULT, BEHIND_AN_INTENT])
async def test_a_lost_session_gives_way_to_its_snapshot(
    chat: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, num_entries: int, is_apart: bool
) -> None:
    place = Place(tmp_path, enduring, is_apart)
    history = await lose(chat, place, num_entries)
    episode = await place.play(chat, DyingWriter(), history, token=2)
    check_as_if_never_lost(episode)
    assert place.server.effects() == made("session-1", 0) + made("session-2", 1, 2), "no result was played again"
    assert (
        f"the environment of episode {NAME} is not reattached, next it is to be restored: environment(lost): its "
        "session session-1 cannot be reattached: LookupError: the server has no session-1"
    ) in caplog.text


async def test_a_snapshot_that_is_lost_as_well_gives_way_to_replay(
    chat: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(tmp_path, replace(enduring, restore=unrestorable))
    history = await lose(chat, place, BEHIND_AN_INTENT)
    check_as_if_never_lost(await place.play(chat, DyingWriter(), history, token=2))
    assert place.server.effects() == made("session-1", 0) + made("session-2", 0, 1, 2)
    assert "is not reattached, next it is to be restored" in caplog.text
    assert "is not restored, next it is to be replayed: environment(lost): its last snapshot" in caplog.text


async def test_a_session_without_snapshots_is_replayed_and_a_step_of_unknown_outcome_is_done_in_the_new_one(
    chat: Any, tmp_path: Path
) -> None:
    place = Place(tmp_path, replace(enduring, restore=None))
    history = await place.cut(chat, BEHIND_AN_INTENT, is_at_once=False)
    place.server.end("session-1")
    check_as_if_never_lost(await place.play(chat, DyingWriter(), history, token=2))
    assert place.server.effects() == made("session-1", 0, 1) + made("session-2", 0, 1, 2), "each at most once in each"


async def test_a_session_that_lives_is_reattached_whatever_else_is_declared(
    chat: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(tmp_path, enduring)
    history = await place.cut(chat, BEHIND_AN_INTENT, is_at_once=False)
    caplog.clear()
    check_as_if_never_lost(await place.play(chat, DyingWriter(), history, token=2))
    assert (place.server.effects(), caplog.text) == (made("session-1", 0, 1, 2), "")


async def test_a_replay_that_answers_otherwise_is_found_out(chat: Any, tmp_path: Path) -> None:
    place = Place(tmp_path, replace(living, is_deterministic=True))
    episode = await place.play(chat, DyingWriter(), await lose(chat, place, BEHIND_AN_INTENT), token=2)
    assert str(episode.failure).startswith("environment(nondeterministic): a fresh instance did not give the result")


@pytest.mark.parametrize("has_snapshots", [True, False])
@pytest.mark.parametrize("has_arrived", [True, False])
async def test_an_external_call_that_only_the_lost_session_knew_of_is_never_made_again(
    chat: Any, tmp_path: Path, has_snapshots: bool, has_arrived: bool
) -> None:
    restore = enduring.restore if has_snapshots else None
    place = Place(tmp_path, replace(enduring, restore=restore, **EXTERNAL))
    history = await place.cut(chat, BEHIND_AN_INTENT, is_at_once=not has_arrived)
    place.server.end("session-1")
    episode = await place.play(chat, DyingWriter(), history, token=2)
    assert str(episode.failure).startswith("environment(outcome_unknown): whether query was carried out")
    assert (episode.reward, place.server.begun()) == (None, ["session-1"])
    assert place.server.effects() == made("session-1", *range(1 + has_arrived))


@pytest.mark.parametrize("has_snapshots", [True, False])
async def test_an_external_call_on_record_is_remembered_and_not_replayed(
    chat: Any, tmp_path: Path, has_snapshots: bool
) -> None:
    restore = enduring.restore if has_snapshots else unrestorable
    place = Place(tmp_path, replace(enduring, restore=restore, **EXTERNAL))
    episode = await place.play(chat, DyingWriter(), await lose(chat, place, BEHIND_A_RESULT), token=2)
    assert episode.failure is None
    assert place.server.effects() == made("session-1", 0) + made("session-2", 1, 2)


async def test_with_no_way_left_the_failure_is_the_last_one(chat: Any, tmp_path: Path) -> None:
    place = Place(tmp_path, replace(enduring, restore=unrestorable, is_deterministic=False))
    episode = await place.play(chat, DyingWriter(), await lose(chat, place, BEHIND_AN_INTENT), token=2)
    assert str(episode.failure).startswith(
        "environment(lost): its last snapshot cannot be restored: OSError: the image is gone (line "
    )


async def test_only_a_state_that_is_gone_leads_on_to_the_next_way(chat: Any, tmp_path: Path) -> None:
    """A worker process that crashed says nothing about the session."""
    place = Place(tmp_path, enduring)
    history = await place.cut(chat, BEHIND_AN_INTENT, is_at_once=True)

    def crash(options: Any, task: Any, handle: str) -> Any:
        raise EpisodeError(Boundary.ENVIRONMENT, "crashed", "the worker is gone")

    place.definition = replace(enduring, reattach=crash)
    episode = await place.play(chat, DyingWriter(), history, token=2)
    assert str(episode.failure) == "environment(crashed): the worker is gone"
    assert place.server.begun() == ["session-1"]


async def die_again(chat: Any, place: Place, history: EpisodeHistory, num_entries: int) -> EpisodeHistory:
    """What is on record of two workers once the second has died as well."""
    writer = DyingWriter(num_entries, True, place.server.disconnect)
    with pytest.raises(WorkerDied):
        await place.play(chat, writer, history, token=2)
    place.server.connect()
    both = build_history([*history.entries, *writer.entries])
    assert both is not None
    return both


@pytest.mark.parametrize("restore", [enduring.restore, unrestorable])
async def test_a_session_once_left_behind_is_never_gone_back_to(chat: Any, tmp_path: Path, restore: Any) -> None:
    """It could not be reached for a while, and knows nothing of what another one did for the episode since."""
    place = Place(tmp_path, replace(enduring, restore=restore))
    history = await place.cut(chat, BEHIND_A_RESULT, is_at_once=True)
    away, there = tmp_path / "away", tmp_path / "session-1.session"
    there.rename(away)
    history = await die_again(chat, place, history, 5)  # lease, no handle, reply, intent, result
    assert [entry.handle for entry in history.entries if isinstance(entry, EnvironmentStarted)] == ["session-1", None]
    away.rename(there)
    check_as_if_never_lost(await place.play(chat, DyingWriter(), history, token=3))
    replayed = (0, 1, 2) if restore is unrestorable else (2,)
    assert place.server.effects()[-len(replayed) :] == made("session-3", *replayed)


async def test_a_session_begun_anew_before_anything_was_done_is_reattached_by_the_next_worker(
    chat: Any, tmp_path: Path
) -> None:
    place = Place(tmp_path, living)
    history = await die_again(chat, place, await lose(chat, place, 2), 4)  # lease, new handle, reply, intent
    assert history.opened is not None
    assert history.opened.handle == "session-2"
    episode = await place.play(chat, DyingWriter(), history, token=3)
    assert (episode.failure, place.server.effects()) == (None, made("session-2", 0, 1, 2))


async def test_parking_ends_a_session_that_nobody_could_find_again(chat: Any, tmp_path: Path) -> None:
    place = Place(tmp_path, enduring)
    history = await lose(chat, place, BEHIND_A_RESULT)
    await park(chat, place, DyingWriter(), history, token=2)
    assert (place.server.begun(), place.server.alive()) == (["session-1", "session-2"], [])
