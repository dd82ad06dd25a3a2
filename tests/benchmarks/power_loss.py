"""Power is lost at every moment of a run, in many ways: is a reply lost that was acknowledged?

Figures: `states` of a disk that were rebuilt and read, `turns_lost` over all of them, `faults` of any kind (what was
acknowledged is missing, what was never appended shows, a journal cannot be read or started from).
`found_without`: with one protection switched off, in a smaller run, how many states were found at fault.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from agentrl.journal import frames
from tests.benchmarks.outages import OutagePlan, Verdict, play_outages
from tests.benchmarks.report import report

NUM_STATES = 20_000
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


async def run(folder: Path, seed: int) -> None:
    whole, number = Verdict(), 0
    while whole.states < NUM_STATES:
        verdict = await play_outages(OutagePlan(seed=seed + number), folder / f"whole-{number}")
        whole.add(verdict)
        number += 1
    without = {name: await measure_without(name, folder / name) for name in PROTECTIONS}
    report(
        "power_loss",
        states=whole.states,
        turns_lost=whole.turns_lost,
        faults=sum(whole.faults.values()),
        entries_compared=whole.entries,
        starts=whole.starts,
        found_without={name: sum(verdict.faults.values()) for name, verdict in without.items()},
        turns_lost_without={name: verdict.turns_lost for name, verdict in without.items()},
        states_without={name: verdict.states for name, verdict in without.items()},
        found_without_sync=without["syncs_files"].turns_lost > 0,
        runs=number,
        seed=seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder), seed))


if __name__ == "__main__":
    main()
