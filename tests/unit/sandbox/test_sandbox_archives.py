from __future__ import annotations

import contextlib
import io
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.sandbox.archives import archive_of, regular_files
from agentrl.types.errors import EpisodeError

NAMES = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3).map("/".join)


@given(st.dictionaries(NAMES, st.binary(max_size=2000), max_size=6))
def test_files_come_back_as_they_were(files: dict[str, bytes]) -> None:
    assert regular_files(archive_of(files)) == files


def test_nothing_but_regular_files_below_the_folder_is_read() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("./fine", "../climbs", "/absolute", "deep/../../climbs", "deep/fine"):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"data"))
        for name, kind in (("link", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE), ("pipe", tarfile.FIFOTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    assert regular_files(buffer.getvalue()) == {"fine": b"data", "deep/fine": b"data"}


@given(st.binary(min_size=1, max_size=3000))
def test_bytes_that_are_no_archive_are_a_fault_of_the_sandbox_or_nothing(data: bytes) -> None:
    with contextlib.suppress(EpisodeError):
        assert regular_files(data) == {}


def test_a_sparse_file_that_claims_a_terabyte_is_left_out(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "small").write_bytes(b"data")
    archive = subprocess.run(
        ["tar", "--sparse", "-c", "-C", str(tmp_path), "huge", "small"], check=True, capture_output=True
    ).stdout
    assert len(archive) < 1 << 20
    assert regular_files(archive) == {"small": b"data"}


def test_an_archive_that_was_cut_off_is_a_fault() -> None:
    with pytest.raises(EpisodeError, match="no archive"):
        regular_files(archive_of({"a": b"x" * 5000})[:3000])
