"""How long a run of a million turns takes to open its journal: with nothing archived, and behind a checkpoint.

The journal has three entries a turn, 64 episodes of 10 turns at once, groups of 8, a step for every 256 episodes and a
checkpoint for every 10 steps. The last 160 episodes are not trained yet, and of the others one in 1,563 is in play all
the time, 64 in all: 224 are not final, some of them in every segment. Figures: `unpruned_s` and `open_s` (medians of
three), the second after the archiver has archived and compacted the same journal, which takes `checkpoint_s`;
`journal_mb` before, `left_mb` after. It was just written, so it comes from memory as far as that holds it. The journal
lies in `--folder`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from agentrl.journal.appender import SEGMENT_BYTES
from agentrl.journal.archiver import Archiver
from agentrl.journal.claim import Claim
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
IN_PLAY_EVERY = 1_563


def write_journal(folder: Path) -> int:
    """Write a journal with as few system calls as can be; the number of its episodes."""
    load, episodes = EpisodeLoad(TURNS_EACH), TURNS // TURNS_EACH
    worker = SegmentFile.create(folder / "worker-00000001.journal", 1)
    for first in range(0, episodes, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, episodes))
        histories = [load.entries(_name(number), number // GROUP, number % GROUP) for number in numbers]
        worker.append([entry for together in zip(*histories, strict=True) for entry in together])
        if worker.size >= SEGMENT_BYTES:
            worker = _next(worker)
    buffer = SegmentFile.create(folder / "buffer-00000001.journal", 1)
    buffer.append([pack(None, entry) for entry in _steps(episodes)])
    for segment in (worker, buffer):
        segment.sync()
        segment.close()
    return episodes


def _steps(episodes: int) -> Iterator[object]:
    numbers = [[n for n in range(first, first + GROUP) if not is_in_play(n)] for first in range(0, episodes, GROUP)]
    groups = [(group, tuple(map(_name, members))) for group, members in enumerate(numbers)]
    for step in range(len(groups) // GROUPS_PER_STEP):
        yield from step_entries(step, tuple(groups[step * GROUPS_PER_STEP : (step + 1) * GROUPS_PER_STEP]))
        if (step + 1) % STEPS_PER_CHECKPOINT == 0:
            yield Checkpointed({"main": step + 1})


def is_in_play(number: int) -> bool:
    return number % IN_PLAY_EVERY == 0


def _next(segment: SegmentFile) -> SegmentFile:
    segment.sync()
    segment.close()
    number = segment.header.number + 1
    return SegmentFile.create(segment.path.with_name(f"worker-{number:08d}.journal"), number)


def _name(number: int) -> str:
    return f"train-{number // GROUP:06d}-{number % GROUP}"


def _opened(folder: Path) -> tuple[float, int]:
    """Seconds that it takes to open, the median of three, and the episodes that are not final."""
    seconds, unfinished = [], 0
    for _ in range(3):
        started = time.perf_counter()
        unfinished = len(open_journal(folder).lives)
        seconds.append(time.perf_counter() - started)
    return round(statistics.median(seconds), 3), unfinished


def _megabytes(folder: Path) -> int:
    return round(sum(path.stat().st_size for path in folder.glob("*.journal")) / 1e6)


def measure(folder: Path) -> None:
    journal = folder / "journal"
    journal.mkdir()
    started = time.perf_counter()
    episodes = write_journal(journal)
    build_s = time.perf_counter() - started
    journal_mb, (unpruned_s, before) = _megabytes(journal), _opened(journal)
    started = time.perf_counter()
    Archiver().move(str(journal), Claim.take(journal).token, str(folder / "episodes"), 2**40)
    checkpoint_s = time.perf_counter() - started
    open_s, after = _opened(journal)
    assert before == after, "archiving lost episodes"
    report(
        "journal_open",
        turns=TURNS,
        unpruned_s=unpruned_s,
        open_s=open_s,
        checkpoint_s=round(checkpoint_s, 1),
        build_s=round(build_s, 1),
        episodes=episodes,
        unfinished=after,
        journal_mb=journal_mb,
        left_mb=_megabytes(journal),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where the journal is made, then deleted")
    with tempfile.TemporaryDirectory(dir=parser.parse_args().folder, prefix=".journal-") as folder:
        measure(Path(folder))


if __name__ == "__main__":
    main()
