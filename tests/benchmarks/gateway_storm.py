"""Programs of the official SDKs over the gateway, while weights are published every second and connections break.

Figures: `calls`, each counted once however often it was sent, and `publishes`; `client_errors` that no client had
provoked, `tokens_wrong` (lost, twice, or of another version or log-probability than the engines reported),
`branches_wrong` (replies that nobody asked for, that are missing, or that hang elsewhere than their conversations say);
what programs `did`, how often connections were `cut_`, what the gateway `counted`.
`found_without_protection`: storms with one protection switched off each all find a fault; `calls_until_found`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from agentrl.process.loop import run_async
from tests.benchmarks.report import report
from tests.storms.gateway_storm import PROTECTIONS, StormPlan, storm

NUM_CALLS = 500
NUM_PUBLISHES = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=NUM_CALLS)
    parser.add_argument("--publishes", type=int, default=NUM_PUBLISHES)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentrl-gateway-storm-") as name:
        folder = Path(name)
        whole = run_async(storm(StormPlan(folder / "storm", given.calls, given.publishes, given.seed)))
        unprotected = {
            protection: run_async(
                storm(StormPlan(folder / protection, given.calls, given.publishes, given.seed, protection))
            )
            for protection in PROTECTIONS
        }
    report(
        "gateway_storm",
        calls=whole.calls,
        publishes=whole.publishes,
        client_errors=len(whole.client_errors),
        tokens_wrong=whole.faults.tokens_wrong,
        branches_wrong=whole.faults.branches_wrong,
        found_without_protection=all(not found.is_clean for found in unprotected.values()),
        calls_until_found={protection: found.calls for protection, found in unprotected.items()},
        episodes=whole.episodes,
        sampled_tokens=whole.sampled_tokens,
        aborts=whole.aborts,
        did=dict(whole.did),
        counted=dict(whole.counted),
        faults=[*whole.client_errors, *whole.faults.notes][:20],
        seed=given.seed,
    )


if __name__ == "__main__":
    main()
