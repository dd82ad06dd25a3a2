"""Small journals for tests: entries of episodes and of the buffer, in segments as writers leave them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from agentrl import codec
from agentrl.journal import entries as e
from agentrl.journal.archive import Archived, archive
from agentrl.journal.archive_file import episode_of
from agentrl.journal.compaction import compact
from agentrl.journal.disk import DISK, Disk
from agentrl.journal.index import JournalIndex
from agentrl.journal.reading import JournalState
from agentrl.journal.segments import SegmentFile, number_of, segment_paths
from agentrl.testing.builders import build_ticket
from agentrl.types.environment import Opening, Score, ScoreRecord
from agentrl.types.episode import Agent, Episode, Node, SampledColumns, StopReason, Turn
from agentrl.types.generation import FinishReason
from agentrl.types.message import Message, Role
from agentrl.types.version import PolicyVersion, VersionSpan


def name_of(number: int) -> str:
    """Name of the n-th episode; groups are of two."""
    return f"train-{number // 2:06d}-{number % 2}"


def turned(index: int, reply: list[int]) -> e.TurnCommitted:
    """A prompt or bridge of two tokens and a reply."""
    spans = (VersionSpan(PolicyVersion(0, 3), 0, len(reply)),)
    sample = SampledColumns(-np.linspace(0.1, 0.9, len(reply), dtype=np.float32), spans, spans)
    context = Node(2 * index, 2 * index - 1 if index else None, "agent", index, np.array([5, 6], np.int32))
    node = Node(2 * index + 1, 2 * index, "agent", index, np.array(reply, np.int32), sample)
    return e.TurnCommitted(1, Turn(index, "agent", node.index), (context, node), FinishReason.STOP, f"digest{index}")


def whole_life(number: int, turns: int = 2) -> list[e.EpisodeEntry]:
    """Every entry of an episode that was played to its end."""
    ticket = build_ticket(name_of(number), number // 2, number % 2)
    begin = [
        e.Leased(ticket, (Agent("agent", "main"),), 1),
        e.EnvironmentStarted(1, Opening((Message(Role.USER, "count"),))),
    ]
    middle = [turned(turn, [number, 7, 8 + turn]) for turn in range(turns)]
    verdict = ScoreRecord("verifier", Score(number / 8, {"queries": 2.0}))
    return [*begin, *middle, e.Scored(1, verdict), e.Ended(1, StopReason.ANSWERED, None, 3.5)]


def taken(step: int, *episodes: int, policy: str = "main", policies: tuple[str, ...] = ("main",)) -> e.Taken:
    """A step that trains these episodes as one group, which is to be trained by all of the policies."""
    return e.Taken(policy, PolicyVersion(0, step), ((step, tuple(map(name_of, episodes))),), (policies,))


def dropped(step: int, *episodes: int) -> e.Dropped:
    """Episodes that no step will train."""
    return e.Dropped(step, tuple(map(name_of, episodes)), "stale", step)


class Journal:
    """Writes entries to segments without an event loop; `rotate` begins a writer's next segment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._open: dict[str, SegmentFile] = {}

    def rotate(self, writer: str) -> None:
        number = 1 + max(map(number_of, segment_paths(self.folder, writer)), default=0)
        self.close(writer)
        self._open[writer] = SegmentFile.create(self.folder / f"{writer}-{number:08d}.journal", number)

    def close(self, writer: str) -> None:
        if writer in self._open:
            self._open.pop(writer).close()

    def play(self, number: int, entries: list[e.EpisodeEntry], writer: str = "worker") -> None:
        self._append(writer, [e.pack(name_of(number), entry) for entry in entries])

    def note(self, *entries: e.Entry, writer: str = "buffer") -> None:
        self._append(writer, [e.pack(None, entry) for entry in entries])

    def _append(self, writer: str, packed: list[tuple[int, int, bytes]]) -> None:
        if writer not in self._open:
            self.rotate(writer)
        self._open[writer].append(packed)


class DyingDisk(Disk):
    """A process that dies before one of its calls that remove a segment or give it its name."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def rename(self, path: Path, target: Path) -> None:
        self._count(target)
        super().rename(path, target)

    def remove(self, path: Path) -> None:
        self._count(path)
        super().remove(path)

    def _count(self, path: Path) -> None:
        self.calls -= path.suffix == ".journal"
        if self.calls < 0:
            raise KeyboardInterrupt


def archive_now(folder: Path, target: Path, keep_bytes: int | None = None) -> Archived:
    """Archive what is final, and compact nothing."""
    return archive(JournalIndex(folder), target, keep_bytes)


def archive_and_compact(folder: Path, target: Path, disk: Disk = DISK) -> int:
    """What the archiver does at a checkpoint; how many segments were replaced."""
    journal = JournalIndex(folder)
    archive(journal, target, disk=disk)
    return compact(journal, 1, disk)


def read_archived(file: Path, name: str) -> Episode:
    """The only episode of that name in a file of the archive."""
    (record,) = pq.read_table(file, filters=[("episode_id", "=", name)])["record"].to_pylist()
    return episode_of(record)


def told(state: JournalState) -> dict[str, object]:
    """All that a state says, comparable."""
    return {
        "lives": [(name, codec.encode(life)) for name, life in sorted(state.lives.items())],
        "buffer": codec.encode((state.taken, state.stepped, state.dropped, state.left_out)),
        "checkpointed": state.checkpointed,
        "torn_tails": state.torn_tails,
    }
