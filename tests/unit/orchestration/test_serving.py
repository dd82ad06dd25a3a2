from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np

from agentrl.orchestration.config import PolicyConfig
from agentrl.orchestration.serving import Serving, build_serving
from agentrl.types.batch import WeightsManifest
from agentrl.types.errors import EpisodeError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion, VersionSpan

FIRST = WeightsManifest("main", PolicyVersion(0, 0), "/model", {}, 0)
SHORT_S = 0.05


class OneTokenEngine:
    name = "x"
    repeated_calls: Counter[str] = Counter()

    async def generate(self, request: GenerationRequest) -> Generation:
        spans = (VersionSpan(FIRST.version, 0, 1),)
        return Generation(np.zeros(1, np.int32), np.zeros(1, np.float32), spans, spans, FinishReason.STOP)


def _serving(mode: str, logs: Path) -> Serving:
    """Of a policy whose requests wait for an engine 0.05 s."""
    settings = {
        "model": "/model",
        "engine": {"kind": "embedded", "start_s": SHORT_S / 3},
        "client": {"load_s": SHORT_S / 3},
        "fleet": {"wait_s": SHORT_S, "dead_s": SHORT_S / 3},
        "publish": {"pause_mode": mode, "drain_s": 100 * SHORT_S},
    }
    engine, keeper = OneTokenEngine(), None
    return build_serving(PolicyConfig.model_validate(settings), [engine], keeper, FIRST, logs)  # type: ignore[arg-type,list-item]


async def test_requests_outlast_the_drain_of_their_engine_however_briefly_they_may_wait(tmp_path: Path) -> None:
    request = GenerationRequest("rid", "session", np.zeros(1, np.int32), 1, (), Sampling(), 0)
    draining, other = (_serving(mode, tmp_path) for mode in ("drain", "abort"))
    with draining.fleet.held("x"), other.fleet.held("x"):
        tasks = [asyncio.create_task(serving.router.generate(request)) for serving in (draining, other)]
        ended, waiting = await asyncio.wait(tasks, timeout=4 * SHORT_S)
        assert (ended, waiting) == ({tasks[1]}, {tasks[0]})
        assert isinstance(tasks[1].exception(), EpisodeError)
    assert (await tasks[0]).finish is FinishReason.STOP
