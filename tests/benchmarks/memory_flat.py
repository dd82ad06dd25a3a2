"""Whether memory grows with what a run has consumed: 100,000 small episodes go through the whole journal.

They are written and acknowledged, trained, covered by a checkpoint for every 5,000, archived and compacted.
Figures: `growth_mb`, by how much resident memory after a checkpoint grew from the second quarter to the last (medians,
since allocators keep what threads have freed); `peak_mb`; and what is left on the disk, `journal_mb` of the journal and
`archive_mb` of the archive, whose oldest files go beyond 1 MB (the episodes are alike and pack well).
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from agentrl.journal.archive import Archived, archive
from agentrl.journal.compaction import compact
from agentrl.journal.entries import Checkpointed, pack
from agentrl.journal.index import JournalIndex, open_journal
from agentrl.journal.writer import JournalWriter
from tests.benchmarks.journal_load import EpisodeLoad, step_entries
from tests.benchmarks.report import report

EPISODES = 100_000
AT_ONCE = 100
PER_CHECKPOINT = 5_000
SEGMENT_BYTES = 4 * 2**20
KEEP_BYTES = 1_000_000


async def play(writer: JournalWriter, load: EpisodeLoad, numbers: Sequence[int]) -> None:
    """Some episodes at once, then the step that trains them as one group."""

    async def play_one(number: int) -> None:
        for entry in load.entries(f"train-{number:06d}-0", number, 0):
            await writer.append(*entry)

    await asyncio.gather(*map(play_one, numbers))
    names = tuple(f"train-{number:06d}-0" for number in numbers)
    for entry in step_entries(numbers[0] // AT_ONCE, ((numbers[0], names),)):
        await writer.append(*pack(None, entry))


async def consume(folder: Path, target: Path) -> tuple[list[Archived], list[int], list[float]]:
    """All episodes; what was archived and deleted, and resident memory after each checkpoint in MB."""
    writer, load = JournalWriter(folder, "run", SEGMENT_BYTES), EpisodeLoad(turns=2, sampled_tokens=20)
    archived, deleted, resident = [], [], []
    for first in range(0, EPISODES, AT_ONCE):
        await play(writer, load, range(first, first + AT_ONCE))
        if (first + AT_ONCE) % PER_CHECKPOINT == 0:
            await writer.append(*pack(None, Checkpointed({"main": first // AT_ONCE + 1})))
            journal = await asyncio.to_thread(JournalIndex, folder)
            archived.append(await asyncio.to_thread(archive, journal, target, KEEP_BYTES))
            deleted.append(await asyncio.to_thread(compact, journal, 1))
            del journal
            resident.append(_resident_mb())
    await writer.close()
    return archived, deleted, resident


def measure(folder: Path) -> None:
    journal, target = folder / "journal", folder / "episodes"
    started = time.perf_counter()
    archived, deleted, resident = asyncio.run(consume(journal, target))
    quarter = len(resident) // 4
    report(
        "memory_flat",
        growth_mb=round(statistics.median(resident[-quarter:]) - statistics.median(resident[quarter : 2 * quarter]), 1),
        peak_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        episodes=sum(done.episodes for done in archived),
        checkpoints=len(archived),
        segments_deleted=sum(deleted),
        files_deleted=sum(done.deleted_files for done in archived),
        unfinished=len(open_journal(journal).lives),
        journal_mb=round(_megabytes(journal), 1),
        archive_mb=round(_megabytes(target), 1),
        seconds=round(time.perf_counter() - started, 1),
    )


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def _megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.iterdir()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where the journal is made, then deleted")
    with tempfile.TemporaryDirectory(dir=parser.parse_args().folder, prefix=".journal-") as folder:
        measure(Path(folder))


if __name__ == "__main__":
    main()
