from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from journal_model import JournalModel, Loss, Piece, Segment
from journal_parts import intent, lease, xor

from agentrl.journal import entries as e
from agentrl.journal.claim import Claim
from agentrl.journal.frames import frame_bytes
from agentrl.journal.reading import JournalState, read_journal
from agentrl.journal.segments import FORMAT, SegmentHeader
from agentrl.journal.writer import JournalWriter
from agentrl.testing.power_loss import RecordingDisk
from agentrl.types.errors import StorageError

WRITERS = ("a", "b")
EPISODES = ("e0", "e1", "e2")
SEGMENT_BYTES = 700
BATCHES = st.lists(st.sampled_from(EPISODES), min_size=1, max_size=3)


class JournalMachine(RuleBasedStateMachine):
    """Writers that come and go, die within a write, lose their claim, and files that are spoiled or deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp()) / "journal"
        # No power is lost here, so nothing need be synced for real.
        self.disk = RecordingDisk(self.folder.parent)
        self.model = JournalModel()
        self.last_number = 0
        self.writers: dict[str, JournalWriter] = {}
        self.current: dict[str, Segment | None] = dict.fromkeys(WRITERS)
        self.holders: dict[str, tuple[str, int]] = {}
        self._start()

    @rule(writer=st.sampled_from(WRITERS), episodes=BATCHES)
    def append(self, writer, episodes):
        entries = [entry for episode in episodes for entry in self._entries(writer, episode)]
        self._append(writer, entries)
        segment = self._segment(writer)
        for episode, entry in entries:
            self._add(segment, episode, entry)
        segment.mark()

    @rule()
    def stop_and_start(self):
        for writer in self.writers.values():
            self.loop.run_until_complete(writer.close())
        self._start()

    @rule(writer=st.sampled_from(WRITERS))
    def lose_the_claim(self, writer):
        Claim.take(self.folder, self.disk)
        before = {path.name: path.read_bytes() for path in self.folder.glob("*.journal")}
        with pytest.raises(StorageError, match="another process has taken over"):
            self._append(writer, [("e0", intent(0))])
        assert {path.name: path.read_bytes() for path in self.folder.glob("*.journal")} == before
        self.stop_and_start()

    @precondition(lambda self: any(self.current.values()))
    @rule(data=st.data(), episodes=BATCHES)
    def die_within_a_write(self, data, episodes):
        """Its last batch is in the file up to some byte, with a hole in it if power was lost too."""
        writer = data.draw(st.sampled_from([name for name in WRITERS if self.current[name]]))
        segment = self.current[writer]
        entries = [entry for episode in episodes for entry in self._entries(writer, episode)]
        places = self._place(segment, entries)
        written = b"".join(places.values())
        cut = data.draw(st.integers(0, len(written)))
        hole = data.draw(st.integers(0, cut))
        filled = data.draw(st.integers(hole, cut))
        with (self.folder / segment.name).open("ab") as file:
            file.write(written[:hole] + bytes(filled - hole) + written[filled:cut])
        # A hole that happens to be what was written there is none.
        first_missing = segment.size + next((at for at in range(hole, filled) if written[at]), cut)
        for (episode, entry), (start, data_bytes) in zip(entries, places.items(), strict=True):
            if start + len(data_bytes) > first_missing:
                segment.is_torn = segment.size < start or cut > start - min(places)
                break
            self._add(segment, episode, entry)
        self._start()

    @rule(writer=st.sampled_from(WRITERS), size=st.integers(0, 47))
    def die_while_a_segment_is_made(self, writer, size):
        number = len(self.model.of(writer)) + 1
        segment = Segment(writer, number, size=size)
        (self.folder / segment.name).write_bytes(SegmentHeader(FORMAT, number, 1).to_bytes()[:size])
        self.model.segments.append(segment)
        self._start()

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data())
    def spoil_a_block(self, data):
        segment = data.draw(st.sampled_from(self.model.segments))
        path = self.folder / segment.name
        size = path.stat().st_size
        start = data.draw(st.integers(0, max(0, segment.size - 1)))
        end = data.draw(st.integers(start + 1, start + 200))
        whole = path.read_bytes()
        xor(path, start, min(end, size))
        self._check_loss(segment, self.model.spoil(segment, start, end), f"{segment.name} is damaged at bytes ")
        path.write_bytes(whole)

    @precondition(lambda self: self.model.segments)
    @rule(data=st.data())
    def delete_a_file(self, data):
        segment = data.draw(st.sampled_from(self.model.segments))
        path = self.folder / segment.name
        path.rename(self.folder / "deleted")
        others = [other.number for other in self.model.of(segment.writer) if other is not segment]
        is_between = bool(others) and min(others) < segment.number < max(others)
        loss = Loss(segment.pieces, -1 if is_between else None)
        self._check_loss(segment, loss, f"{segment.name} is missing")
        (self.folder / "deleted").rename(path)

    @invariant()
    def everything_is_there(self):
        state = read_journal(self.folder, disk=self.disk)
        assert _numbers(state) == {n: [p.number for p in pieces] for n, pieces in self.model.episodes.items() if pieces}
        assert all(life.is_whole for life in state.lives.values())
        assert {path.name for path in state.torn_tails} >= {s.name for s in self.model.segments if s.is_torn}

    def teardown(self):
        for writer in self.writers.values():
            self.loop.run_until_complete(writer.close())
        self.loop.close()
        shutil.rmtree(self.folder.parent)

    def _start(self):
        """A new process: it claims the journal, and takes over whatever it goes on with."""
        claim = Claim.take(self.folder, self.disk)
        for writer in self.writers.values():
            self.loop.run_until_complete(writer.close())
        self.writers = {
            name: JournalWriter(self.folder, name, SEGMENT_BYTES, claim.check, self.disk) for name in WRITERS
        }
        self.current = dict.fromkeys(WRITERS)
        self.holders = {}

    def _entries(self, writer: str, episode: str) -> list[tuple[str, e.EpisodeEntry]]:
        """An entry of an episode, behind a lease if another holds it."""
        holder, token = self.holders.get(episode, ("", 0))
        self.last_number += 1
        if holder == writer:
            return [(episode, intent(self.last_number, token))]
        token = self.last_number
        self.holders[episode] = (writer, token)
        return [(episode, lease(episode, token, self._count(episode))), (episode, intent(self.last_number, token))]

    def _count(self, episode: str) -> int:
        return len(self.model.episodes.get(episode, []))

    def _append(self, writer: str, entries: list[tuple[str, e.EpisodeEntry]]) -> None:
        async def together() -> None:
            await asyncio.gather(*(self.writers[writer].append(*e.pack(*entry)) for entry in entries))

        self.loop.run_until_complete(together())

    def _segment(self, writer: str) -> Segment:
        """Where the writer's next batch goes."""
        current = self.current[writer]
        if current is not None and current.size < SEGMENT_BYTES:
            return current
        segments = self.model.of(writer)
        if segments and segments[-1].pieces:
            marks = [piece.start for piece in segments[-1].pieces if piece.is_mark]
            segments[-1].durable = marks[-1] if current is not None else segments[-1].size
        self.current[writer] = Segment(writer, len(segments) + 1)
        self.model.segments.append(self.current[writer])
        return self.current[writer]

    def _add(self, segment: Segment, episode: str, entry: e.EpisodeEntry) -> Piece:
        is_lease = isinstance(entry, e.Leased)
        number = entry.token if is_lease else entry.step
        piece = segment.add(len(e.pack(episode, entry)[2]), episode=episode, number=number, is_lease=is_lease)
        self.model.episodes.setdefault(episode, []).append(piece)
        return piece

    def _place(self, segment: Segment, entries: list[tuple[str, e.EpisodeEntry]]) -> dict[int, bytes]:
        """The bytes of a batch, by the place of each frame."""
        header = SegmentHeader.of((self.folder / segment.name).read_bytes(), self.folder / segment.name)
        places: dict[int, bytes] = {}
        at = segment.size
        for entry in entries:
            places[at] = frame_bytes(header.identity, at, *e.pack(*entry))
            at += len(places[at])
        return places

    def _check_loss(self, segment: Segment, loss: Loss, message: str) -> None:
        """Acknowledged entries never go without an error, and a salvage keeps all that can be trusted."""
        kept = self.model.kept(segment, loss)
        if loss.first is not None:
            with pytest.raises(StorageError, match=message if loss.first < 0 else f"{message}{loss.first} to"):
                read_journal(self.folder, disk=self.disk)
            assert _numbers(read_journal(self.folder, salvage=True, disk=self.disk)) == kept
            return
        state = read_journal(self.folder, disk=self.disk)
        for name, numbers in _numbers(state).items():
            assert numbers == kept.get(name, []) or not state.lives[name].is_whole
        assert kept.keys() <= state.lives.keys()


def _numbers(state: JournalState) -> dict[str, list[int]]:
    """What stands in each life, in order: tokens of leases, numbers of intents."""
    return {
        name: [entry.token if isinstance(entry, e.Leased) else entry.step for entry in life.entries]
        for name, life in state.lives.items()
    }


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(max_examples=60, stateful_step_count=25)
