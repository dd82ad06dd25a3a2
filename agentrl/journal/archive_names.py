"""The names of an archive's files: who has come how far, and what their bytes are."""

from __future__ import annotations

from pathlib import Path

DIGITS = 16  # of a digest


def archive_files(folder: Path) -> list[Path]:
    """Files of an archive in the order of their writing."""
    return sorted(folder.glob("consumed-*-*.parquet"), key=number_of_file)


def file_name(step: int, number: int, digest: str) -> str:
    """The name of a file by the digest of its bytes. Example: ``consumed-000004-8c1a6f0b2d9e4475-000002.parquet``."""
    return f"consumed-{step:06d}-{digest[:DIGITS]}-{number:06d}.parquet"


def number_of_file(path: Path) -> int:
    """The number that puts a file of the archive in order."""
    return int(path.stem.rpartition("-")[2])


def digest_in_name(path: Path) -> str | None:
    """The first digits of the digest of a file's bytes; None of one that an older program wrote."""
    digest = path.stem.split("-")[2]
    return digest if len(digest) == DIGITS else None
