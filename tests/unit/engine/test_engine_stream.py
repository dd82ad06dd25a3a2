from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
from stepping import make_scheduler, step

from agentrl.engine.adapters import AdapterService
from agentrl.engine.generation import GenerationService
from agentrl.engine.model import ServedModel
from agentrl.engine.options import EngineOptions


async def test_a_reader_who_is_slower_than_the_engine_still_gets_the_end(tiny_model: Path) -> None:
    model = ServedModel(EngineOptions(model=tiny_model, port=1, max_running_requests=2))
    scheduler = make_scheduler(model, 2, prefill_tokens=64)
    service = GenerationService(scheduler, AdapterService(model.lora, scheduler, 8), frozenset(), 300)
    hangup = asyncio.create_task(asyncio.Event().wait())
    body = {"input_ids": [20, 31, 42], "rid": "slow", "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    stream = service.stream(body, hangup)
    first = asyncio.ensure_future(anext(stream))
    while not first.done():
        step(scheduler)
        await asyncio.sleep(0)
    while scheduler.num_running:
        step(scheduler)
    *_, last, done = [await first, *[event async for event in stream]]
    assert done == b"data: [DONE]\n\n"
    answer = orjson.loads(last.removeprefix(b"data: "))
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    assert answer["meta_info"]["weight_versions"] == [{"version": "0.0", "start": 0, "end": 5}]
