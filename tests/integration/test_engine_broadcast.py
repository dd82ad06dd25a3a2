from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine_server import EngineCalls, EngineServer, Reference, logprobs_of, running_engine, spans_of

from agentrl.process.ports import free_port
from agentrl.weights.buckets import Bucket
from agentrl.weights.sender import SenderProcess

pytestmark = pytest.mark.long

PROMPT = [20, 31, 42, 53, 64, 75, 86]
COLLECTIVE_S = 8.0
_numbers = itertools.count()


@pytest.fixture
async def sender(tmp_path: Path) -> AsyncIterator[SenderProcess]:
    process = await SenderProcess.start("sender", tmp_path / "sender.log")
    yield process
    process.kill()


@pytest.fixture
async def hasty(engine_model: Path, other_model: Path, tmp_path: Path) -> AsyncIterator[EngineCalls]:
    """An embedded engine that waits for a broadcast no longer than `COLLECTIVE_S`."""
    with running_engine(engine_model, tmp_path / "hasty.log", "--collective-s", str(COLLECTIVE_S)) as url:
        calls = EngineCalls(EngineServer(url, engine_model, other_model))
        yield calls
        await calls.http.aclose()


async def _join(engine: EngineCalls, sender: SenderProcess) -> str:
    port = free_port()
    name = f"group-{os.getpid()}-{next(_numbers)}"
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    joining = sender.call("join", 0, "127.0.0.1", port, 2, name, "gloo", 90.0, 0, result=type(None), deadline_s=90)
    answer, _ = await asyncio.gather(
        engine.ok("/init_weights_update_group", **body, group_name=name, backend="gloo"), joining
    )
    assert answer["success"] is True
    return name


async def _open(engine: EngineCalls, sender: SenderProcess, bucket_bytes: int = 60_000) -> list[Bucket]:
    arguments = (str(engine.server.other_model), bucket_bytes)
    return await sender.call("open", *arguments, result=list[Bucket], deadline_s=90)


def _body(bucket: Bucket, group: str, **more: Any) -> dict[str, Any]:
    shapes = [list(shape) for shape in bucket.shapes]
    body = {"names": list(bucket.names), "dtypes": list(bucket.dtypes), "shapes": shapes, "group_name": group}
    return body | {"load_format": "flattened_bucket", "flush_cache": False} | more


async def _send(sender: SenderProcess, index: int) -> None:
    await sender.call("broadcast", index, result=type(None), deadline_s=90)


async def _check_serves(engine: EngineCalls, reference: Reference, model: Path, version: str) -> None:
    answer = await engine.generate(PROMPT, max_new_tokens=10, ignore_eos=True)
    assert spans_of(answer) == [(version, 0, 10)]
    expected = reference.sampled(model, PROMPT, answer["output_ids"])
    assert logprobs_of(answer) == pytest.approx(expected, abs=1e-3)


async def test_buckets_come_through_a_group_and_are_served_with_the_last(
    engine: EngineCalls, sender: SenderProcess, reference: Reference
) -> None:
    group = await _join(engine, sender)
    buckets = await _open(engine, sender)
    assert len(buckets) > 2
    await engine.ok("/pause_generation", mode="abort")
    await engine.ok("/begin_weight_update")
    for index, bucket in enumerate(buckets):
        last = {"weight_version": "0.1", "flush_cache": True} if index == len(buckets) - 1 else {}
        update = engine.ok("/update_weights_from_distributed", **_body(bucket, group, **last))
        await asyncio.gather(update, _send(sender, index))
    await engine.ok("/end_weight_update")
    await engine.ok("/continue_generation")
    await _check_serves(engine, reference, engine.server.other_model, "0.1")
    await engine.ok("/destroy_weights_update_group", group_name=group)
    await engine.refused("/destroy_weights_update_group", group_name=group)


async def test_tensors_come_one_by_one_where_no_format_is_named(
    engine: EngineCalls, sender: SenderProcess, reference: Reference
) -> None:
    group = await _join(engine, sender)
    buckets = await _open(engine, sender, bucket_bytes=1)
    names, dtypes = [b.names[0] for b in buckets], [b.dtypes[0] for b in buckets]
    whole = Bucket(tuple(names), tuple(dtypes), tuple(b.shapes[0] for b in buckets), 0)

    async def send_all() -> None:
        for index in range(len(buckets)):
            await _send(sender, index)

    await engine.ok("/pause_generation", mode="abort")
    await engine.ok("/begin_weight_update")
    body = _body(whole, group, load_format=None, weight_version="0.1", flush_cache=True)
    sending = asyncio.create_task(send_all())
    await engine.ok("/update_weights_from_distributed", **body)
    await sending
    await engine.ok("/end_weight_update")
    await engine.ok("/continue_generation")
    await _check_serves(engine, reference, engine.server.other_model, "0.1")
    await engine.ok("/destroy_weights_update_group", group_name=group)


async def test_a_broadcast_is_taken_while_tokens_flow_and_served_by_the_swap(
    embedded: EngineCalls, sender: SenderProcess, reference: Reference
) -> None:
    group = await _join(embedded, sender)
    buckets = await _open(embedded, sender)
    keys = ("names", "dtypes", "shapes")
    announced = [{key: _body(bucket, group)[key] for key in keys} for bucket in buckets]
    request = await embedded.start_running(PROMPT, "flows-on-0002")
    body = {"weight_version": "0.1", "group_name": group, "buckets": announced}
    staging = asyncio.create_task(embedded.ok("/stage_weights", **body))
    for index in range(len(buckets)):
        await _send(sender, index)
    await staging
    assert not request.answer.done()
    await embedded.ok("/pause_generation", mode="abort")
    assert {version for version, _, _ in spans_of(await request.answer)} == {"0.0"}
    await embedded.ok("/swap_weights", weight_version="0.1")
    await embedded.ok("/continue_generation")
    await _check_serves(embedded, reference, embedded.server.other_model, "0.1")
    await embedded.ok("/destroy_weights_update_group", group_name=group)


async def test_an_engine_that_waits_for_a_broadcast_answers_everything_else(
    embedded: EngineCalls, sender: SenderProcess, reference: Reference
) -> None:
    group = await _join(embedded, sender)
    (bucket,) = await _open(embedded, sender, bucket_bytes=10**9)
    await embedded.ok("/pause_generation", mode="abort")
    await embedded.ok("/begin_weight_update")
    body = _body(bucket, group, weight_version="0.1", flush_cache=True)
    update = asyncio.create_task(embedded.ok("/update_weights_from_distributed", **body))
    await asyncio.sleep(0.1)
    assert (await embedded.info())["weight_version"] == "0.0"
    await embedded.ok("/continue_generation")
    await _check_serves(embedded, reference, embedded.server.model, "0.0")
    request = await embedded.start_running(PROMPT, "runs-meanwhile-0001")
    await embedded.ok("/abort_request", rid="runs-meanwhile-0001")
    await request.answer
    await embedded.ok("/pause_generation", mode="abort")
    assert not update.done()
    await _send(sender, 0)
    await update
    await embedded.ok("/end_weight_update")
    await embedded.ok("/continue_generation")
    await _check_serves(embedded, reference, embedded.server.other_model, "0.1")


@pytest.mark.parametrize("fate", ["dies", "never sends"])
async def test_a_sender_that_fails_in_mid_update_leaves_the_old_weights_served(
    hasty: EngineCalls, sender: SenderProcess, reference: Reference, fate: str
) -> None:
    buckets = await _open(hasty, sender)
    group = await _join(hasty, sender)
    await hasty.ok("/pause_generation", mode="abort")
    await hasty.ok("/begin_weight_update")
    first = hasty.ok("/update_weights_from_distributed", **_body(buckets[0], group))
    await asyncio.gather(first, _send(sender, 0))
    second = asyncio.create_task(hasty.refused("/update_weights_from_distributed", **_body(buckets[1], group)))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    if fate == "dies":
        sender.kill()
    message = await second
    assert group in message
    assert time.monotonic() - started < (COLLECTIVE_S - 1.0 if fate == "dies" else COLLECTIVE_S + 60.0)
    await hasty.ok("/end_weight_update")
    await hasty.ok("/begin_weight_update")
    again = await hasty.refused("/update_weights_from_distributed", **_body(buckets[1], group))
    assert f"no group {group}" in again
    await hasty.ok("/end_weight_update")
    await hasty.ok("/continue_generation")
    await _check_serves(hasty, reference, hasty.server.model, "0.0")


async def test_a_group_whose_sender_never_comes_is_given_up_by_name(hasty: EngineCalls) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        started = time.monotonic()
        message = await hasty.refused("/init_weights_update_group", **body, group_name="lonely", backend="gloo")
    assert "group lonely did not form" in message
    assert time.monotonic() - started < COLLECTIVE_S + 60.0
    assert (await hasty.info())["weight_version"] == "0.0"


async def test_a_broadcast_into_a_wrong_shape_is_refused_before_it_is_awaited(
    embedded: EngineCalls, sender: SenderProcess, reference: Reference
) -> None:
    group = await _join(embedded, sender)
    buckets = await _open(embedded, sender)
    await embedded.ok("/begin_weight_update")
    shapes = [[7] for _ in buckets[0].shapes]
    message = await embedded.refused("/update_weights_from_distributed", **_body(buckets[0], group, shapes=shapes))
    assert buckets[0].names[0] in message
    assert "has shape (7,)" in message
    await embedded.ok("/end_weight_update")
    await _check_serves(embedded, reference, embedded.server.model, "0.0")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group_name": "never-made"}, "no group never-made"),
        ({"names": ["model.norm.weight"]}, "equally many"),
        ({"dtypes": ["float33"]}, "float33"),
        ({"shapes": [[-4]]}, "must be a list of sizes"),
        ({"load_format": "direct"}, "load_format"),
    ],
)
async def test_an_incomplete_announcement_is_refused(
    embedded: EngineCalls, sender: SenderProcess, change: dict[str, Any], words: str
) -> None:
    body = {"names": ["a"], "dtypes": ["float32"], "shapes": [[4]], "load_format": None} | change
    if "names" in change:
        body |= {"names": ["a", "b"]}
    body.setdefault("group_name", "" if "group_name" in change else await _join(embedded, sender))
    await embedded.ok("/begin_weight_update")
    assert words in await embedded.refused("/update_weights_from_distributed", **body)


async def test_a_broadcast_outside_of_an_update_is_refused(engine: EngineCalls) -> None:
    body = {"names": [], "dtypes": [], "shapes": [], "group_name": "any"}
    assert "begin_weight_update" in await engine.refused("/update_weights_from_distributed", **body)
