"""Weights that have arrived and wait to be served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.engine.request import BadRequestError
from agentrl.engine.weights import StagedWeights

# Folder, then name, bytes and time of change of each file of weights.
FolderStamp = tuple[str, tuple[tuple[str, int, int], ...]]


@dataclass(slots=True)
class UpdateSession:
    """What came between begin and end.

    Invariant: after a failure nothing of the session is served, however many buckets came before.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    flushes: bool = False
    _staged: StagedWeights = field(default_factory=StagedWeights)
    _has_failed: bool = False

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Around all that may refuse a bucket. Raises BadRequestError also if an earlier one was refused."""
        if self._has_failed:
            raise BadRequestError("an earlier bucket was refused; end this weight update and begin another")
        try:
            yield
        except BadRequestError:
            self._has_failed = True
            raise

    def add(self, staged: StagedWeights, flushes: bool) -> None:
        """Take in a bucket."""
        self._staged = self._staged.with_more(staged)
        self.flushes = self.flushes or flushes

    def take(self) -> StagedWeights:
        """All buckets that came since the last call; nothing after a failure."""
        staged, self._staged = self._staged, StagedWeights()
        return StagedWeights() if self._has_failed else staged


@dataclass(frozen=True, slots=True)
class PreparedWeights:
    """Weights that were staged ahead of a pause; `stamp` is that of the folder they came from, None for tensors."""

    version: str
    stamp: FolderStamp | None
    weights: StagedWeights

    def is_of(self, version: str | None, stamp: FolderStamp | None) -> bool:
        """Whether these are the weights of that version and origin, unchanged since."""
        return self.version == version and self.stamp == stamp


def folder_stamp(folder: Path) -> FolderStamp:
    """What tells a folder's weights from others that are put there later."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    stats = [(file.name, file.stat()) for file in files]
    return str(folder), tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
