from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dying_worker import NAME, DyingWriter, Place, park, results_of
from rollout_parts import ANSWER, CALL, in_turn, nothing

from agentrl.journal.claim import Claim
from agentrl.journal.entries import Intended, Leased
from agentrl.journal.history import EpisodeHistory, build_history
from agentrl.journal.reading import read_journal
from agentrl.journal.writer import JournalWriter
from agentrl.testing.builders import build_ticket
from agentrl.testing.durable_environments import living
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.sole_holder import SoleHolder
from agentrl.types.episode import Episode
from agentrl.types.errors import StorageError
from agentrl.types.generation import Generation, GenerationRequest


class Replaced(ScriptedEngine):
    """As it gives the second reply, another worker claims the journal."""

    folder: Path

    async def generate(self, request: GenerationRequest) -> Generation:
        if len(request.conversation) > 1:
            Claim.take(self.folder)
        return await super().generate(request)


class Overtaken(ScriptedEngine):
    """As it gives the second reply, the next worker takes the episode over, and parks it."""

    place: Place
    writer: DyingWriter
    next_token: int
    before: EpisodeHistory | None = None
    is_overtaken = False

    def recorded(self) -> EpisodeHistory:
        history = build_history([*(self.before.entries if self.before else ()), *self.writer.entries])
        assert history is not None
        return history

    async def generate(self, request: GenerationRequest) -> Generation:
        if len(request.conversation) > 1 and not self.is_overtaken:
            self.is_overtaken = True
            await park(self._chat, self.place, DyingWriter(), self.recorded(), self.next_token)
        return await super().generate(request)


class SlowDisk(JournalWriter):
    """Acknowledges what it has not written: the bytes of a worker that stood still come when a test says so."""

    late: list[tuple[int, int, bytes]]

    def note(self, schema: int, kind: int, payload: bytes) -> None:
        self.late.append((schema, kind, payload))

    async def append(self, schema: int, kind: int, payload: bytes) -> None:
        self.late.append((schema, kind, payload))

    async def write(self, record: tuple[int, int, bytes]) -> None:
        await super().append(*record)


async def play(place: Place, chat: Any, journal: SoleHolder, engine: Any = None) -> Episode:
    """One worker's part of the episode; its writer is closed behind it."""
    async with place.host() as host:
        runner = place.runner(chat, host, journal, engine)
        try:
            return await runner.run(runner.open(build_ticket()), nothing)
        finally:
            await journal.writer.close()


async def test_a_worker_that_was_replaced_raises_before_its_environment_acts(chat: Any, tmp_path: Path) -> None:
    place = Place(tmp_path, living)
    first = Claim.take(tmp_path / "journal")
    engine = Replaced(chat, in_turn(CALL, CALL, ANSWER))
    engine.folder = first.folder
    journal = SoleHolder(JournalWriter(first.folder, "worker", check_right=first.check), first.token)
    with pytest.raises(StorageError, match="another process has taken over"):
        await play(place, chat, journal, engine)
    assert place.server.effects() == [f"session-1 {NAME}/0.0"], "the second call was intended, and never made"
    assert place.server.alive() == ["session-1"], "the session is its successor's"
    history = read_journal(first.folder).lives[NAME]
    steps = [entry.step for entry in history.entries if isinstance(entry, Intended)]
    assert (len(history.turns), steps, history.ended) == (1, [0], None)


async def test_a_worker_that_was_replaced_hears_so_at_everything_that_it_writes(tmp_path: Path) -> None:
    first = Claim.take(tmp_path / "journal")
    writer = JournalWriter(first.folder, "worker", check_right=first.check)
    await writer.append(1, 19, b"\0" * 8)
    Claim.take(first.folder)
    with pytest.raises(StorageError, match="another process has taken over"):
        await writer.append(1, 19, b"\0" * 8)
    with pytest.raises(StorageError, match="another process has taken over"):
        writer.note(1, 19, b"\0" * 8)
    await writer.close()


async def test_what_a_replaced_worker_wrote_late_counts_for_nothing(chat: Any, tmp_path: Path) -> None:
    """It checked its right, then stood still until its successor had read and played; then its bytes came."""
    place, folder = Place(tmp_path, living), tmp_path / "journal"
    first = Claim.take(folder)
    writer = SlowDisk(folder, "worker-a")
    writer.late = []
    lost = await play(place, chat, SoleHolder(writer, first.token))
    lease, *late = writer.late
    await writer.write(lease)

    second = Claim.take(folder)
    histories = read_journal(folder).lives
    assert [type(entry) for entry in histories[NAME].entries] == [Leased]
    journal = SoleHolder(JournalWriter(folder, "worker-b", check_right=second.check), second.token, histories)
    episode = await play(place, chat, journal)
    for record in late:
        await writer.write(record)
    await writer.close()

    history = read_journal(folder).lives[NAME]
    assert results_of(lost) == ["session-1 call 1", "session-1 call 2"]
    assert results_of(episode) == results_of(history.episode()) == ["session-2 call 1", "session-2 call 2"]
    assert (history.fenced, history.token) == (len(late), second.token)


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("has_begun_it", [False, True])
async def test_a_session_refuses_a_late_act_of_a_worker_that_was_replaced(
    chat: Any, tmp_path: Path, has_begun_it: bool, is_apart: bool
) -> None:
    """It has its reply, stands still while its successor reattaches the session, and goes on as if nothing was."""
    place, engine = Place(tmp_path, living, is_apart), Overtaken(chat, in_turn(CALL, CALL, ANSWER))
    token = 1 if has_begun_it else 2
    engine.before = None if has_begun_it else await place.cut(chat, 5, is_at_once=True)
    engine.place, engine.writer, engine.next_token = place, DyingWriter(), token + 1
    histories = {NAME: engine.before} if engine.before else None
    async with place.host() as host:
        runner = place.runner(chat, host, SoleHolder(engine.writer, token, histories), engine)
        late = await runner.run(runner.open(build_ticket()), nothing)
    assert str(late.failure).startswith("environment(step): PermissionError: session-1 is held under token")
    assert place.server.effects() == [f"session-1 {NAME}/0.0"], "the late call did not arrive"
    assert place.server.alive() == ["session-1"], "and its end takes nothing from the successor"
