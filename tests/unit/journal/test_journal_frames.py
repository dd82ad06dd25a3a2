from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.journal.frames import HEADER_BYTES, Frame, TornTail, frame_bytes, read_frames
from agentrl.journal.segments import FORMAT, SegmentFile, SegmentHeader, read_segment
from agentrl.types.errors import StorageError

IDENTITY = 0x1234_5678_9ABC_DEF0
PAYLOADS = st.lists(st.binary(max_size=40), max_size=6)


def _write(payloads: list[bytes], identity: int = IDENTITY, start: int = 0) -> bytes:
    data = b""
    for kind, payload in enumerate(payloads):
        data += frame_bytes(identity, start + len(data), 1, kind, payload)
    return data


def test_a_frame_takes_its_payload_and_twenty_bytes() -> None:
    data = frame_bytes(IDENTITY, 0, 1, 3, b"hello")
    assert HEADER_BYTES == 20
    assert list(read_frames(IDENTITY, data)) == [Frame(1, 3, b"hello", 0, 25)]


@given(PAYLOADS, st.integers(0, 400))
def test_any_prefix_gives_the_whole_frames_in_it_and_a_tear_for_the_rest(payloads: list[bytes], cut: int) -> None:
    data = _write(payloads)[:cut]
    ends = [sum(HEADER_BYTES + len(p) for p in payloads[: n + 1]) for n in range(len(payloads))]
    whole = [end for end in ends if end <= len(data)]
    frames = list(read_frames(IDENTITY, data))
    found = [f for f in frames if isinstance(f, Frame)]
    assert [frame.payload for frame in found] == payloads[: len(whole)]
    torn = [f for f in frames if isinstance(f, TornTail)]
    assert [tear.at for tear in torn] == ([] if len(data) == (whole[-1] if whole else 0) else [max(whole, default=0)])


@given(PAYLOADS.filter(bool), st.data())
def test_a_changed_byte_is_never_read_as_an_entry(payloads: list[bytes], data: st.DataObject) -> None:
    written = bytearray(_write(payloads))
    place = data.draw(st.integers(0, len(written) - 1))
    written[place] ^= data.draw(st.integers(1, 255))
    frames = list(read_frames(IDENTITY, bytes(written)))
    assert isinstance(frames[-1], TornTail)
    assert frames[-1].at <= place
    assert [f.payload for f in frames[:-1]] == payloads[: len(frames) - 1]


def test_frames_of_another_segment_or_another_place_are_none_of_ours() -> None:
    frame = frame_bytes(IDENTITY, 0, 1, 3, b"hello")
    for identity, start in ((IDENTITY + 1, 0), (IDENTITY, 25)):
        assert list(read_frames(identity, frame, start)) == [TornTail(start, "the checksum is wrong")]


def test_a_segment_is_read_back_and_its_torn_tail_cut(tmp_path: Path) -> None:
    path = tmp_path / "w-00000001.journal"
    segment = SegmentFile.create(path, 1)
    segment.append([(1, 3, b"one"), (1, 4, b"two")])
    segment.sync()
    segment.append([(1, 5, b"three")])
    segment.close()
    path.write_bytes(path.read_bytes()[:-2])
    *entries, tear = read_segment(path)
    assert [(e.kind, e.payload) for e in entries] == [(3, b"one"), (4, b"two")]
    assert tear.reason == "the file ends within a payload"


def test_a_segment_without_a_header_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "w-00000001.journal"
    SegmentFile.create(path, 1).close()
    path.write_bytes(path.read_bytes()[:10])
    assert list(read_segment(path)) == [TornTail(0, "the file has no header")]


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "w-00000001.journal"
    path.write_bytes(SegmentHeader(FORMAT + 1, 1, 5).to_bytes())
    with pytest.raises(StorageError, match=f"journal format {FORMAT + 1}, this program knows {FORMAT}"):
        list(read_segment(path))


def test_a_segment_is_never_made_twice(tmp_path: Path) -> None:
    path = tmp_path / "w-00000001.journal"
    SegmentFile.create(path, 1).close()
    with pytest.raises(StorageError, match="cannot be made"):
        SegmentFile.create(path, 1)
