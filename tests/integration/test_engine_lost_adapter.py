from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engine_server import EngineCalls, Reference
from lora_adapters import make_adapter

from agentrl.inference.config import FleetConfig
from agentrl.inference.fleet import Fleet
from agentrl.inference.supervision import FleetSupervisor
from agentrl.protocols import Engine
from agentrl.types.batch import WeightsManifest
from agentrl.types.version import PolicyVersion
from agentrl.weights.adapter import AdapterTransport
from agentrl.weights.config import PublishConfig
from agentrl.weights.publisher import StagedPublisher
from agentrl.weights.resync import Resynchronizer

PROMPT = [(11 * n) % 280 + 10 for n in range(30)]
FIRST, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)


class SomebodyElse:
    """Keeps engines that this run did not start: nobody tells it that one has ended."""

    async def engine_ended(self, name: str) -> str:
        return await asyncio.get_running_loop().create_future()

    async def revive_engine(self, name: str) -> Engine:
        raise AssertionError("the engine never died")


async def test_an_engine_that_came_back_without_its_adapter_is_given_it_again(
    lora_engine: EngineCalls, reference: Reference, engine_model: Path, tmp_path: Path
) -> None:
    made = make_adapter(engine_model, tmp_path, seed=5)
    client = lora_engine.server.client()
    fleet = Fleet([client], FIRST)
    base = WeightsManifest("main", FIRST, str(engine_model), {}, 0)
    publisher = StagedPublisher(fleet, AdapterTransport(), PublishConfig(), base)
    await publisher.publish(WeightsManifest("main", V1, str(made.folder), {}, 0, kind="adapter"))
    assert await client.probe() == V1
    await lora_engine.ok("/unload_lora_adapter", lora_name="adapter-0.1")  # as by a restart
    assert await client.probe() == FIRST

    resynchronizer = Resynchronizer(fleet, publisher)
    supervisor = FleetSupervisor(fleet, SomebodyElse(), FleetConfig(probe_s=0.05))
    services = [asyncio.create_task(service.run()) for service in (supervisor, resynchronizer)]
    async with asyncio.timeout(20):
        while not publisher.counts.resyncs:
            await asyncio.sleep(0.01)
    for service in services:
        service.cancel()
    await asyncio.gather(*services, return_exceptions=True)
    assert fleet.healthy == ["engine"]
    assert await client.probe() == V1
    assert await client.score(PROMPT) == pytest.approx(reference.logprobs(made.merged, PROMPT), abs=1e-4)
    await publisher.close()
    await client.close()
    await lora_engine.ok("/unload_lora_adapter", lora_name="adapter-0.1")
