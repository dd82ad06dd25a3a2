from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dying_worker import NAME, NUM_ENTRIES, NUM_LIVING, DyingWriter, Place, park, results_of

from agentrl import codec
from agentrl.journal.entries import EnvironmentStarted, Intended, StepResultRecorded
from agentrl.journal.history import build_history
from agentrl.testing.durable_environments import (
    LivingEnvironment,
    SessionState,
    SnapshotEnvironment,
    living,
    snapshotting,
)

STEPS = [f"{NAME}/0.0", f"{NAME}/1.0", ""]
BEHIND_JUDGING = 12
CUTS = [(number, is_at_once) for number in range(2, NUM_ENTRIES) for is_at_once in (True, False)]
LIVING_CUTS = [(n, is_at_once) for n in range(2, NUM_LIVING) for is_at_once in (True, False) if n != BEHIND_JUDGING]
EXTERNAL = {"external_tools": frozenset({"query"})}


def all_effects(session: str) -> list[str]:
    return [f"{session} {ids}".rstrip() for ids in STEPS]


async def test_the_cuts_of_these_tests_are_behind_every_entry(chat: Any, tmp_path: Path) -> None:
    writer = DyingWriter()
    episode = await Place(tmp_path, living).play(chat, writer)
    assert (episode.reward, len(writer.entries)) == (1.0, NUM_LIVING)


@pytest.mark.parametrize(("num_entries", "is_at_once"), LIVING_CUTS)
async def test_a_session_is_reattached_as_if_its_worker_had_never_died(
    chat: Any, tmp_path: Path, num_entries: int, is_at_once: bool
) -> None:
    place = Place(tmp_path, living)
    history = await place.cut(chat, num_entries, is_at_once)
    assert place.server.alive() == ["session-1"]
    episode = await place.play(chat, DyingWriter(), history, token=2)
    assert (episode.failure, episode.reward, episode.metrics) == (None, 1.0, {"steps": 3.0})
    assert results_of(episode) == ["session-1 call 1", "session-1 call 2"]
    assert place.server.effects() == all_effects("session-1"), "each step once, in the one session"
    assert (place.server.begun(), place.server.alive()) == (["session-1"], []), "and a normal end closes it"


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("has_arrived", [True, False])
async def test_a_call_without_a_result_is_asked_for_before_it_is_dispatched(
    chat: Any, tmp_path: Path, step: int, has_arrived: bool
) -> None:
    place = Place(tmp_path, living)
    history = await place.cut(chat, 4 + 3 * step, is_at_once=not has_arrived)
    assert history.pending is not None
    assert len(place.server.effects()) == step + has_arrived
    writer = DyingWriter()
    episode = await place.play(chat, writer, history, token=2)
    assert place.server.effects() == all_effects("session-1")
    assert episode.metrics == {"steps": 3.0}
    resulted = next(entry for entry in writer.entries if isinstance(entry, StepResultRecorded))
    answers = [message.content for message in resulted.result.messages]
    assert answers == [f"session-1 call {step + 1}"] * (step < 2)
    assert resulted.result.is_done == (step == 2)
    assert not [e for e in writer.entries if isinstance(e, Intended) and e.step <= step], "nothing is intended twice"


@pytest.mark.parametrize("has_arrived", [True, False])
async def test_an_external_call_of_a_living_session_is_reconciled(chat: Any, tmp_path: Path, has_arrived: bool) -> None:
    place = Place(tmp_path, replace(living, **EXTERNAL))
    history = await place.cut(chat, 7, is_at_once=not has_arrived)
    episode = await place.play(chat, DyingWriter(), history, token=2)
    assert (episode.failure, place.server.effects()) == (None, all_effects("session-1"))


@pytest.mark.parametrize("is_apart", [False, True])
async def test_a_session_that_is_gone_is_a_failure_that_names_it(chat: Any, tmp_path: Path, is_apart: bool) -> None:
    place = Place(tmp_path, living, is_apart)
    history = await place.cut(chat, 7, is_at_once=True)
    place.server.end("session-1")
    episode = await place.play(chat, DyingWriter(), history, token=2)
    assert str(episode.failure) == (
        "environment(lost): its session session-1 cannot be reattached: LookupError: the server has no session-1"
    )
    assert (episode.reward, len(place.server.effects())) == (None, 1)


@pytest.mark.parametrize("is_apart", [False, True])
async def test_parking_leaves_the_session_alive_and_the_next_worker_goes_on_in_it(
    chat: Any, tmp_path: Path, is_apart: bool
) -> None:
    place, writer = Place(tmp_path, living, is_apart), DyingWriter()
    await park(chat, place, writer)
    assert place.server.alive() == ["session-1"]
    episode = await place.play(chat, DyingWriter(), build_history(writer.entries), token=2)
    assert (episode.reward, place.server.effects()) == (1.0, all_effects("session-1"))
    assert place.server.alive() == []


async def test_a_session_that_cannot_be_detached_ends_neither_the_episode_nor_the_run(
    chat: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Clinging(LivingEnvironment):
        async def detach(self) -> None:
            raise RuntimeError("no")

    writer = DyingWriter()
    await park(chat, Place(tmp_path, replace(living, create=lambda options, task: Clinging(options))), writer)
    history = build_history(writer.entries)
    assert history is not None
    assert history.ended is None
    assert "could not be left alive: environment(detach): RuntimeError: no" in caplog.text


@pytest.mark.parametrize(("num_entries", "is_at_once"), CUTS)
async def test_a_snapshot_brings_the_state_back_from_behind_the_last_result(
    chat: Any, tmp_path: Path, num_entries: int, is_at_once: bool
) -> None:
    place = Place(tmp_path, snapshotting)
    history = await place.cut(chat, num_entries, is_at_once)
    writer = DyingWriter()
    episode = await place.play(chat, writer, history, token=2)
    assert (episode.failure, episode.reward, episode.metrics) == (None, 1.0, {"steps": 3.0})
    session = "session-1" if history.results else "session-2"  # before the first snapshot nothing was done to keep
    assert results_of(episode) == [f"{session} call 1", f"{session} call 2"]
    assert len([e for e in writer.entries if isinstance(e, StepResultRecorded)]) == 3 - len(history.results)


async def test_while_a_scaffold_is_run_again_recorded_snapshots_stand_for_new_ones(chat: Any, tmp_path: Path) -> None:
    taken: list[int] = []

    class Counting(SnapshotEnvironment):
        async def snapshot(self) -> bytes:
            taken.append(len(self._state.results))
            return await super().snapshot()

    definition = replace(
        snapshotting,
        create=lambda options, task: Counting(options),
        restore=lambda options, task, snapshot: Counting(options, codec.from_json(snapshot, SessionState)),
    )
    place = Place(tmp_path, definition)
    history = await place.cut(chat, 8, is_at_once=True)
    taken.clear()
    await place.play(chat, DyingWriter(), history, token=2)
    assert taken == [3]


async def test_an_external_call_of_unknown_outcome_is_refused_even_with_a_snapshot(chat: Any, tmp_path: Path) -> None:
    place = Place(tmp_path, replace(snapshotting, **EXTERNAL))
    for num_entries in (4, 7):
        history = await place.cut(chat, num_entries, is_at_once=True)
        num_before = len(place.server.effects())
        episode = await place.play(chat, DyingWriter(), history, token=2)
        assert str(episode.failure).startswith("environment(outcome_unknown): whether query was carried out")
        assert len(place.server.effects()) == num_before


async def test_a_session_in_a_worker_process_outlives_the_process(chat: Any, tmp_path: Path) -> None:
    place = Place(tmp_path, living, is_apart=True)
    history = await place.cut(chat, 7, is_at_once=False)
    assert (history.opened.handle, len(history.results)) == ("session-1", 1)
    episode = await place.play(chat, DyingWriter(), history, token=2)
    assert (episode.failure, episode.metrics) == (None, {"steps": 3.0})
    assert place.server.effects() == all_effects("session-1"), "the call that had arrived was asked for, not repeated"


async def test_a_snapshot_crosses_the_border_of_a_worker_process_and_back(chat: Any, tmp_path: Path) -> None:
    place = Place(tmp_path, snapshotting, is_apart=True)
    history = await place.cut(chat, 8, is_at_once=True)
    assert all(result.snapshot for result in history.results)
    episode = await place.play(chat, DyingWriter(), history, token=2)
    assert (episode.failure, episode.metrics) == (None, {"steps": 3.0})
    assert results_of(episode) == ["session-1 call 1", "session-1 call 2"]


async def test_a_worker_that_died_before_its_opening_was_on_record_leaves_a_session_and_nothing_else(
    chat: Any, tmp_path: Path
) -> None:
    place = Place(tmp_path, living)
    history = await place.cut(chat, 1, is_at_once=False)
    assert not [entry for entry in history.entries if isinstance(entry, EnvironmentStarted)]
    episode = await place.play(chat, DyingWriter(), history, token=2)
    assert (episode.failure, place.server.effects()) == (None, all_effects("session-2"))
    assert place.server.alive() == ["session-1"], (
        "its name is not on record: whoever runs the server must let it expire"
    )
