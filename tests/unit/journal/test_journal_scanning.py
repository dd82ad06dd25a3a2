from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.journal import entries as e
from agentrl.journal.frames import Frame, TornTail
from agentrl.journal.scanning import SegmentReader
from agentrl.journal.segments import HEADER_BYTES, SegmentFile, read_segment
from agentrl.types.errors import StorageError
from tests.unit.journal.journals import Journal, whole_life

WORDS = ("train-000000-0", "train-000000-1", None)


def _write(folder: Path, words: list[str | None]) -> Path:
    path = folder / "w-00000001.journal"
    segment = SegmentFile.create(path, 1)
    entries = [
        e.Checkpointed(n) if word is None else e.StepResultRecorded(1, n, (), (), 0.5) for n, word in enumerate(words)
    ]
    segment.append([e.pack(word, entry) for word, entry in zip(words, entries, strict=True)])
    segment.close()
    return path


@settings(deadline=None)  # each example syncs a file
@given(st.lists(st.sampled_from(WORDS), max_size=6), st.data())
def test_a_scan_finds_what_reading_finds_in_damaged_segments_too(words: list[str | None], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = _write(Path(folder), words)
        written = bytearray(path.read_bytes())
        if data.draw(st.booleans()) and len(written) > HEADER_BYTES:
            written[data.draw(st.integers(HEADER_BYTES, len(written) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(written[: data.draw(st.integers(0, len(written)))])
        read = list(read_segment(path))
        with SegmentReader(path) as reader:
            scan = reader.scan()
    frames = [f for f in read if isinstance(f, Frame)]
    found = {key: starts.tolist() for key, starts in scan.places.items()}
    expected: dict[int, list[int]] = {}
    for frame in frames:
        expected.setdefault(e.key_of(frame.payload), []).append(frame.start)
    assert [start for start, _ in scan.buffer] == expected.pop(e.NO_EPISODE, [])
    assert found == expected
    assert [scan.torn_tail] == ([f for f in read if isinstance(f, TornTail)] or [None])


def test_a_scan_stops_before_what_the_buffer_wrote_behind_the_limit(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.note(e.Checkpointed(1))
    journal.play(0, whole_life(0), "buffer")
    with SegmentReader(tmp_path / "buffer-00000001.journal") as reader:
        limit = reader.size
        journal.play(1, whole_life(1), "buffer")
        behind = reader.size
        journal.note(e.Checkpointed(2))
        scan = reader.scan(buffer_limit=limit)
        assert (len(scan.places), [entry.step for _, entry in scan.buffer]) == (2, [1])
        assert (scan.end, scan.torn_tail) == (behind, None)
        assert [entry.step for _, entry in reader.scan().buffer] == [1, 2]


def test_an_entry_of_a_newer_schema_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "w-00000001.journal"
    segment = SegmentFile.create(path, 1)
    _, kind, payload = e.pack(WORDS[0], whole_life(0)[0])
    segment.append([(e.SCHEMA + 1, kind, payload)])
    with SegmentReader(path) as reader, pytest.raises(StorageError, match="install the version that wrote it"):
        reader.scan()


# What is read ahead, 2**18 bytes, reaches behind both frames, to the second one's end, into it, to the first one's
# end, or into that.
@pytest.mark.parametrize(
    "extra_bytes", [0, 2**18 - 60, 2**18 - 56, 2**18 - 55, 2**18 - 40, 2**18 - 28, 2**18 - 27, 300_000]
)
def test_a_single_frame_is_read_by_its_place(tmp_path: Path, extra_bytes: int) -> None:
    path = tmp_path / "w-00000001.journal"
    segment = SegmentFile.create(path, 1)
    segment.append([(1, 3, bytes(8 + extra_bytes)), (1, 4, bytes(8))])
    frames = list(read_segment(path))
    with SegmentReader(path) as reader:
        assert [reader.frame_at(frame.start) for frame in frames] == frames
        assert reader.frame_at(frames[0].start + 1) == TornTail(frames[0].start + 1, "no frame begins here")
        assert isinstance(reader.frame_at(frames[-1].end), TornTail)
