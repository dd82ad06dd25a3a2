"""A proposer and a solver, two policies, learn from each other, by the recipes of `environments/proposals` alone.

Figures: `solver_before` and `solver_after`, the solver's success on fixed held-out problems, which no proposal changes;
`in_band_before` and `in_band_after`, the share of the proposer's proposals on held-out tasks that are valid and that
some of four attempts of the solver of that moment get right, and some not; `in_band_of_valid`, the same of valid
proposals alone, in the first and the last five steps of training; `steps` and mean `staleness` of each policy.

Latencies are those of training, as `latencies` has them; the agents of an episode act one after the other.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.benchmarks.report import report
from tests.storms import proposer_and_solver as pair
from tests.storms.agent_latencies import latencies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for models and run, which is kept")
    parser.add_argument("overrides", nargs="*", help="key.path=value of the run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentrl-proposals-") as name:
        folder = arguments.keep or Path(name)
        began = time.monotonic()
        pair.make(folder, arguments.seed)
        run = pair.train(folder, arguments.seed, arguments.overrides)
        figures = {**pair.learning(run), **latencies(run)}
        report("proposer_solver", **figures, seconds=round(time.monotonic() - began, 1), seed=arguments.seed)


if __name__ == "__main__":
    main()
