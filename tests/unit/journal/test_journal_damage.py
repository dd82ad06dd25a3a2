from __future__ import annotations

import re
from pathlib import Path

import pytest
from journal_parts import intent, lease, numbers_of, write_segment, xor

from agentrl.journal import entries as e
from agentrl.journal.claim import Claim
from agentrl.journal.disk import Disk
from agentrl.journal.frames import MARK_BYTES, Corruption, Frame, TornTail, frame_bytes, mark_bytes, read_frames
from agentrl.journal.reading import read_journal
from agentrl.journal.segments import HEADER_BYTES, SegmentFile, read_segment, segment_path, segment_paths
from agentrl.journal.writer import JournalWriter
from agentrl.testing.full_disk import FullDisk
from agentrl.types.errors import StorageError

IDENTITY = 0x1234_5678_9ABC_DEF0
FRAME = 23


def _marked(*batches: list[bytes], is_marked: bool = True) -> bytearray:
    """Batches of frames, each with its mark; without `is_marked` the last has none."""
    data = b""
    for number, payloads in enumerate(batches):
        for payload in payloads:
            data += frame_bytes(IDENTITY, len(data), 1, 3, payload)
        if is_marked or number < len(batches) - 1:
            data += mark_bytes(IDENTITY, len(data))
    return bytearray(data)


def _read(data: bytearray) -> list[bytes | tuple[int, int] | int]:
    """Payloads of frames, ranges of damage, and the place of a tear."""
    pieces: list[bytes | tuple[int, int] | int] = []
    for piece in read_frames(IDENTITY, bytes(data)):
        match piece:
            case Frame():
                pieces.append(piece.payload)
            case Corruption():
                pieces.append((piece.start, piece.end))
            case TornTail():
                pieces.append(piece.at)
    return pieces


def test_what_cannot_be_read_before_a_mark_is_damage_and_what_is_behind_it_is_kept() -> None:
    data = _marked([b"one", b"two", b"six"])
    data[FRAME + 21] ^= 1
    assert _read(data) == [b"one", (FRAME, 2 * FRAME), b"six"]


def test_what_cannot_be_read_behind_the_last_mark_is_torn_with_all_that_follows() -> None:
    data = _marked([b"one"], [b"two", b"six"], is_marked=False)
    start = FRAME + MARK_BYTES
    data[start : start + FRAME] = bytes(FRAME)
    assert _read(data) == [b"one", start]


def test_damage_reaches_to_the_next_frame_over_marks_and_batches() -> None:
    data = _marked([b"one", b"two"], [b"six"], [b"ten"])
    third = 2 * FRAME + MARK_BYTES
    data[5 : third + 3] = bytes(third - 2)
    assert _read(data) == [(0, third + FRAME), b"ten"]


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """Two episodes, the second of which begins in the second batch."""
    first = [("one", lease("one")), ("one", intent(1)), ("one", intent(2))]
    return write_segment(tmp_path, "w", 1, [first, [("two", lease("two")), ("two", intent(7))], [("one", intent(3))]])


def test_a_damaged_segment_is_refused_by_file_and_bytes(segment: Path) -> None:
    frames = [piece for piece in read_segment(segment) if isinstance(piece, Frame)]
    xor(segment, frames[1].start, frames[1].start + 1)
    message = f"{segment} is damaged at bytes {frames[1].start} to {frames[1].end} .*restore the file from a copy"
    with pytest.raises(StorageError, match=message):
        read_journal(segment.parent)


def test_a_salvage_cuts_an_episode_at_the_damage_and_keeps_the_others(segment: Path) -> None:
    frames = [piece for piece in read_segment(segment) if isinstance(piece, Frame)]
    xor(segment, frames[2].start, frames[2].end)
    state = read_journal(segment.parent, salvage=True)
    assert (numbers_of(state, "one"), numbers_of(state, "two"), state.distrusted) == ([1], [7], 1)
    assert [(damage.start, damage.end) for damage in state.damaged[segment]] == [(frames[2].start, frames[2].end)]


def test_a_salvage_reads_past_a_lost_header(segment: Path) -> None:
    whole = [piece for piece in read_segment(segment) if isinstance(piece, Frame)]
    xor(segment, 0, HEADER_BYTES)
    with pytest.raises(StorageError, match=f"damaged at bytes 0 to {HEADER_BYTES} .the header cannot be read"):
        list(read_segment(segment))
    assert list(read_segment(segment, salvage=True))[1:] == whole


def test_an_episode_that_was_taken_over_with_more_than_is_left_is_not_whole(tmp_path: Path) -> None:
    write_segment(tmp_path, "a", 1, [[("one", lease("one")), ("one", intent(1))]])
    write_segment(tmp_path, "b", 1, [[("one", lease("one", 2, taken_over=3)), ("one", intent(2, 2))]])
    assert not read_journal(tmp_path).lives["one"].is_whole


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_segment_is_missed_between_others_only(missing: int, tmp_path: Path) -> None:
    paths = [write_segment(tmp_path, "w", n, [[(f"e{n}", lease(f"e{n}"))]]) for n in (1, 2, 3)]
    paths[missing - 1].unlink()
    if missing == 2:
        with pytest.raises(StorageError, match=f"{paths[1]} is missing"):
            read_journal(tmp_path)
    state = read_journal(tmp_path, salvage=True)
    assert state.lives.keys() == {"e1", "e2", "e3"} - {f"e{missing}"}
    assert state.missing == [paths[1]] * (missing == 2)


async def test_a_segment_that_was_cut_short_is_missed_once_another_follows(tmp_path: Path) -> None:
    for number in range(2):
        writer = JournalWriter(tmp_path, "w")
        await writer.append(*e.pack("one", lease("one", number, number)))
        await writer.close()
    first, _ = segment_paths(tmp_path, "w")
    for size in (first.stat().st_size - MARK_BYTES - 1, HEADER_BYTES, 0):
        first.write_bytes(first.read_bytes()[:size])
        with pytest.raises(StorageError, match=f"{first} is damaged at bytes"):
            read_journal(tmp_path)


def test_a_writer_that_goes_on_while_it_is_read_is_not_taken_for_damaged(tmp_path: Path) -> None:
    writing = SegmentFile.create(segment_path(tmp_path, "w", 1), 1)

    class LateDisk(Disk):
        """What it reads is old by the time that it is looked at."""

        def read(self, path: Path) -> bytes:
            data = super().read(path)
            writing.append([e.pack("one", intent(1))])
            writing.sync()
            following = SegmentFile.create(segment_path(tmp_path, "w", 2), 2, before=writing.durable)
            following.append([e.pack("one", intent(2))])
            return data

    assert list(read_segment(writing.path, disk=LateDisk())) == []
    assert len(list(read_segment(writing.path))) == 1


async def _fill(writer: JournalWriter) -> tuple[int, StorageError | None]:
    """Append one entry after the other until one fails: how many were acknowledged, and why no more."""
    for count, entry in enumerate([lease("one"), *map(intent, range(10))]):
        try:
            await writer.append(*e.pack("one", entry))
        except StorageError as error:
            return count, error
    return 11, None


@pytest.mark.parametrize("free_bytes", [0, 20, 48, 100, 260, 290])
async def test_a_full_disk_loses_nothing_and_a_new_writer_goes_on(free_bytes: int, tmp_path: Path) -> None:
    disk = FullDisk(free_bytes)
    writer = JournalWriter(tmp_path, "w", disk=disk)
    acknowledged, error = await _fill(writer)
    assert re.search(r"w-00000001.journal cannot be (made|written): .*No space .*free space there", str(error))
    disk.free_bytes = 1 << 20
    with pytest.raises(StorageError, match="No space left"):
        await writer.append(*e.pack("one", intent(99)))
    await writer.close()
    life = read_journal(tmp_path).lives.get("one")
    found = len(life.entries) if life else 0
    assert found >= acknowledged
    following = JournalWriter(tmp_path, "w", disk=disk)
    await following.append(*e.pack("one", lease("one", 2, found)))
    await following.close()
    assert len(read_journal(tmp_path).lives["one"].entries) == found + 1


async def test_two_processes_never_write_one_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.journal.appender.segment_paths", lambda folder, name: [])
    first, second = JournalWriter(tmp_path, "w"), JournalWriter(tmp_path, "w")
    await first.append(*e.pack("one", lease("one")))
    with pytest.raises(StorageError, match="another process has just made it; one run at a time"):
        await second.append(*e.pack("two", lease("two")))
    await first.append(*e.pack("one", intent(1)))
    await first.close()
    await second.close()
    assert numbers_of(read_journal(tmp_path), "one") == [1]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\0", b"\0" * 40])
def test_a_claim_that_was_never_whole_is_nobodys(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "claim-000004.json").write_bytes(content)
    assert Claim.take(tmp_path).token == 5


def test_a_claim_removes_all_that_a_loss_of_power_brought_back(tmp_path: Path) -> None:
    stale = Claim.take(tmp_path)
    returned = (tmp_path / "claim-000001.json").read_bytes()
    Claim.take(tmp_path)
    (tmp_path / "claim-000001.json").write_bytes(returned)
    Claim.take(tmp_path)
    with pytest.raises(StorageError, match="another process has taken over"):
        stale.check()
