"""Power is lost at every moment of a run, in many ways: is a reply lost that was acknowledged?

Figures: `states` of a disk that were rebuilt and read, `turns_lost` over all of them, `faults` of any kind (what was
acknowledged is missing, what was never appended shows, a journal cannot be read or started from).
`found_without`: with one protection switched off, in a smaller run, how many states were found at fault.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from tests.benchmarks.report import report
from tests.storms.journal_protections import PROTECTIONS, measure_without
from tests.storms.outages import OutagePlan, Verdict, play_outages

NUM_STATES = 20_000


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
