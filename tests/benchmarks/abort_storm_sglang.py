"""The abort storm over the real SGLang on a CPU: 500 aborts. Needs `make sglang-cpu`; figures as of `abort_storm`."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig
from tests.benchmarks.abort_storm import make_models, measure
from tests.servers.sglang import running_sglang
from tests.storms.abort_storm import StormPlan

NUM_ABORTS = 500


async def run(url: str, plan: StormPlan) -> None:
    client = EngineClient("sglang", url, ClientConfig())
    try:
        await measure(client, plan, "abort_storm_sglang")
    finally:
        await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder))
        with running_sglang("dense", models[0], Path(folder) / "log", "0.0", max_running_requests=8) as url:
            asyncio.run(run(url, StormPlan(models, NUM_ABORTS, seed=seed)))


if __name__ == "__main__":
    main()
