"""Ten thousand aborts while weights change: is a token lost, is one counted twice, does a span lie?

Figures over the embedded engine: `aborts`, of which `aborts_with_tokens` had drawn some, `tokens_lost`,
`tokens_twice`, and `max_gap`, the largest difference in nats between a recorded log-probability and its
recomputation under the version that its span names.
`found_without_protection`: a shorter storm in which partial outputs are thrown away finds lost tokens, and one in
which the client's clock names the versions finds a gap.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig, EmbeddedEngineConfig
from agentrl.orchestration.commands import EngineLaunch
from agentrl.orchestration.engines import EngineProcess
from agentrl.process.local_place import LocalPlace
from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model
from agentrl.types.version import PolicyVersion
from tests.benchmarks.report import report
from tests.storms.abort_storm import Storm, StormPlan

NUM_ABORTS = 10_000
UNPROTECTED_SHARE = 0.05
GAP_LIMIT_NATS = 1e-3


def make_models(folder: Path) -> tuple[Path, Path]:
    """Two weight sets of one shape, with one tokenizer."""
    shape = TINY_SHAPE.model_copy(update={"context_tokens": 4096})
    return make_tiny_model(folder / "even", 0, shape), make_tiny_model(folder / "odd", 1, shape)


async def measure(client: EngineClient, plan: StormPlan, benchmark: str) -> None:
    """Let the storms blow one after the other over a fresh engine and print the line."""
    whole = await Storm(client, plan).run()
    shorter = replace(plan, num_aborts=max(100, int(plan.num_aborts * UNPROTECTED_SHARE)))
    forgetful = await Storm(client, shorter, is_forgetful=True).run()
    clocked = await Storm(client, shorter, is_clocked=True).run()
    report(
        benchmark,
        aborts=whole.aborts,
        aborts_with_tokens=whole.aborts_with_tokens,
        tokens_lost=whole.tokens_lost,
        tokens_twice=whole.tokens_twice,
        max_gap=whole.max_gap,
        found_without_protection=forgetful.tokens_lost > 0 and clocked.max_gap > GAP_LIMIT_NATS,
        tokens_lost_forgetful=forgetful.tokens_lost,
        max_gap_clocked=clocked.max_gap,
        sampled_tokens=whole.sampled_tokens,
        publishes=whole.publishes,
        episodes=whole.episodes,
        sessions=plan.num_sessions,
        seed=plan.seed,
    )


async def run(folder: Path, seed: int) -> None:
    models = make_models(folder)
    config = EmbeddedEngineConfig(args={"max_running_requests": 8})
    launch = EngineLaunch("main", "storm", models[0], PolicyVersion(0, 0), config, False, folder)
    engine = await EngineProcess.start(launch, ClientConfig(), LocalPlace())
    try:
        await measure(engine.client, StormPlan(models, NUM_ABORTS, seed=seed), "abort_storm")
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder), seed))


if __name__ == "__main__":
    main()
