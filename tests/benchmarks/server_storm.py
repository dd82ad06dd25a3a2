"""Episodes on an environment server whose clients, processes and connections are ended at any moment, 200 times.

Figures: `kills` and of what, `effects_twice`, `lost` (episodes without a result, ended ones played again, turns that
are no more), `episodes` and those of them that `failed` of infrastructure, `other` failures, what the server counted.
`found_without_protection`: without request ids, and without fencing tokens, a call acts twice; `kills_until_found`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from agentrl.process.loop import run_async
from agentrl.testing.tiny import make_tiny_model
from tests.benchmarks.report import report
from tests.storms.server_storm import MOST_UNPROTECTED_KILLS, storm

NUM_KILLS = 200
PROTECTIONS = ("request_ids", "fencing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=NUM_KILLS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentrl-server-storm-") as name:
        folder = Path(name)
        model = make_tiny_model(folder / "model")
        verdict = run_async(storm(folder / "storm", model, arguments.kills, arguments.seed))
        found = {
            protection: run_async(storm(folder / protection, model, MOST_UNPROTECTED_KILLS, arguments.seed, protection))
            for protection in PROTECTIONS
        }
    report(
        "server_storm",
        kills=sum(verdict.kills.values()),
        kills_of=dict(verdict.kills),
        effects_twice=verdict.effects_twice,
        lost=verdict.lost,
        episodes=verdict.episodes,
        calls=verdict.calls,
        failed=dict(verdict.failed),
        other=len(verdict.other),
        served=verdict.served,
        found_without_protection=all(unprotected.effects_twice > 0 for unprotected in found.values()),
        kills_until_found={name: sum(unprotected.kills.values()) for name, unprotected in found.items()},
        seed=arguments.seed,
    )


if __name__ == "__main__":
    main()
