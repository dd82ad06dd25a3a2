"""Protections of the journal against a loss of power, each of which can be switched off: then outages find faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from agentrl.journal import frames
from tests.storms.outages import OutagePlan, Verdict, play_outages

DISK_PROTECTIONS = ("syncs_files", "syncs_names", "syncs_folders", "syncs_reads")
PROTECTIONS = (*DISK_PROTECTIONS, "checksums", "marks")
MAX_RUNS_WITHOUT = 8
SMALL = OutagePlan(num_starts=6, losses_per_moment=3)


@contextmanager
def switched_off(protection: str) -> Iterator[dict[str, bool]]:
    """What `play_outages` is to be told so that a protection is off; those of the reader are off meanwhile."""
    if protection in DISK_PROTECTIONS:
        yield {protection: False}
        return
    replaced = {
        "checksums": ("_checksum", lambda *_: 0),
        # As if a later frame that can be read were proof that what is missing before it had been synced.
        "marks": ("_newest_mark", _last_frame),
    }[protection]
    with patch.object(frames, *replaced):
        yield {}


async def measure_without(protection: str, folder: Path, plan: OutagePlan = SMALL) -> Verdict:
    """The verdict on runs of a journal that lacks one protection: as many, up to a few, as it takes to find a fault."""
    verdict = Verdict()
    with switched_off(protection) as options:
        for number in range(MAX_RUNS_WITHOUT):
            outages = replace(plan, seed=plan.seed + number)
            verdict.add(await play_outages(outages, folder / f"{number}", **options))
            if verdict.faults:
                break
    return verdict


def _last_frame(identity: int, view: memoryview, first: int, start: int) -> int:
    places = range(len(view) - 1, first, -1)
    return next((at for at in places if isinstance(frames._parse(identity, view, at, start), frames.Frame)), first)
