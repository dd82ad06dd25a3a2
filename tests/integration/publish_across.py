"""A publisher on one host and an engine on another: ``python publish_across.py URL HOST FOLDER LOGS``.

Prints as JSON what the engine showed of itself, said behind the new weights, and answered to those without the token.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx
import numpy as np
from fleet_sessions import BUCKET_BYTES, LOAD_S, PROMPT, make_manifest

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig
from agentrl.inference.fleet import Fleet
from agentrl.inference.router import EngineRouter
from agentrl.types.batch import WeightsManifest
from agentrl.types.generation import GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion
from agentrl.weights.broadcast import BroadcastTransport
from agentrl.weights.config import BroadcastTransportConfig, PublishConfig
from agentrl.weights.publisher import StagedPublisher

VERSIONS = [PolicyVersion(0, step) for step in range(2)]


async def main(url: str, host: str, folder: Path, logs: Path, token: str) -> dict[str, object]:
    client = EngineClient("far", url, ClientConfig(control_s=60.0, load_s=LOAD_S), token=token)
    while not await client.is_well(5.0):  # the test that started the engine has the deadline
        await asyncio.sleep(0.1)
    fleet = Fleet([client], VERSIONS[0])
    config = BroadcastTransportConfig(bucket_bytes=BUCKET_BYTES, join_s=LOAD_S)
    transport = BroadcastTransport(config, LOAD_S, logs, host)
    first = WeightsManifest("main", VERSIONS[0], "/no/first/weights", {}, 0)
    publisher = StagedPublisher(fleet, transport, PublishConfig(), first, LOAD_S)
    (receipt,) = await publisher.publish(make_manifest(folder, VERSIONS[1]))
    request = GenerationRequest("across-0001", "across", np.asarray(PROMPT, np.int32), 10, (), Sampling(), 0)
    generation = await EngineRouter(fleet).generate(request)
    answers = await _ask_without_token(url)
    await publisher.close()
    await client.close()
    return {
        "receipt": str(receipt.version),
        "sent_bytes": transport.sent_bytes,
        "tokens": generation.token_ids.tolist(),
        "logprobs": generation.logprobs.tolist(),
        "versions": [str(span.version) for span in generation.versions],
        "answers": answers,
    }


async def _ask_without_token(url: str) -> dict[str, int]:
    """The status of calls by their paths; at a pause that is carried out nothing would be generated."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60.0) as stranger:
        asked = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        calls = [
            await stranger.post("/pause_generation", json={"mode": "abort"}),
            await stranger.post("/generate", json=asked),
            await stranger.get("/model_info"),
            await stranger.get("/health"),
        ]
    return {call.url.path: call.status_code for call in calls}


if __name__ == "__main__":
    url, host, folder, logs = sys.argv[1:]
    print(json.dumps(asyncio.run(main(url, host, Path(folder), Path(logs), sys.stdin.read()))))
