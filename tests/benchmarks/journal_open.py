"""How long a run of a million turns takes to open its journal, if nothing of it was archived.

The journal has three entries a turn, 64 episodes of 10 turns at once, groups of 8, a step for every 256 episodes and a
checkpoint for every 10 steps; the last 160 episodes are not trained yet. Figures: `open_s` (the median of three) and
`journal_mb`. It was just written, so it comes from memory as far as that holds it. The journal lies in `--folder`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from agentrl.journal.appender import SEGMENT_BYTES
from agentrl.journal.entries import Checkpointed, pack
from agentrl.journal.index import open_journal
from agentrl.journal.segments import SegmentFile
from tests.benchmarks.journal_load import EpisodeLoad, step_entries
from tests.benchmarks.report import report

TURNS = 1_000_000
TURNS_EACH = 10
AT_ONCE = 64
GROUP = 8
GROUPS_PER_STEP = 32
STEPS_PER_CHECKPOINT = 10


def write_journal(folder: Path) -> int:
    """Write a journal with as few system calls as can be; the number of its episodes."""
    load, episodes = EpisodeLoad(TURNS_EACH), TURNS // TURNS_EACH
    worker = SegmentFile.create(folder / "worker-00000001.journal", 1)
    for first in range(0, episodes, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, episodes))
        lives = [load.entries(_name(number), number // GROUP, number % GROUP) for number in numbers]
        worker.append([entry for together in zip(*lives, strict=True) for entry in together])
        if worker.size >= SEGMENT_BYTES:
            worker = _next(worker)
    buffer = SegmentFile.create(folder / "buffer-00000001.journal", 1)
    buffer.append([pack(None, entry) for entry in _steps(episodes)])
    for segment in (worker, buffer):
        segment.sync()
        segment.close()
    return episodes


def _steps(episodes: int) -> Iterator[object]:
    groups = [(n, tuple(_name(n * GROUP + member) for member in range(GROUP))) for n in range(episodes // GROUP)]
    for step in range(len(groups) // GROUPS_PER_STEP):
        yield from step_entries(step, tuple(groups[step * GROUPS_PER_STEP : (step + 1) * GROUPS_PER_STEP]))
        if (step + 1) % STEPS_PER_CHECKPOINT == 0:
            yield Checkpointed(step + 1)


def _next(segment: SegmentFile) -> SegmentFile:
    segment.sync()
    segment.close()
    number = segment.header.number + 1
    return SegmentFile.create(segment.path.with_name(f"worker-{number:08d}.journal"), number)


def _name(number: int) -> str:
    return f"train-{number // GROUP:06d}-{number % GROUP}"


def measure(folder: Path) -> None:
    started = time.perf_counter()
    episodes = write_journal(folder)
    seconds = [time.perf_counter() - started]
    for _ in range(3):
        started = time.perf_counter()
        lives = open_journal(folder).lives
        seconds.append(time.perf_counter() - started)
    report(
        "journal_open",
        turns=TURNS,
        open_s=round(statistics.median(seconds[1:]), 2),
        build_s=round(seconds[0], 1),
        episodes=episodes,
        unfinished=len(lives),
        journal_mb=round(sum(path.stat().st_size for path in folder.glob("*.journal")) / 1e6),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where the journal is made, then deleted")
    with tempfile.TemporaryDirectory(dir=parser.parse_args().folder, prefix=".journal-") as folder:
        measure(Path(folder))


if __name__ == "__main__":
    main()
