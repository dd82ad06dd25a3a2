from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from canned_server import CannedServer, canned_server, json_answer

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig
from agentrl.types.errors import EngineError
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import BroadcastWeights, Bucket, FolderWeights, MappedWeights, PauseMode, WeightSource

VERSION = PolicyVersion(0, 4)
FOLDER = FolderWeights("/w")
MAPPED = MappedWeights((("one", "two"), ("three", "four")))
NOT_SERVED = json_answer({}, 404)
MODES = list(PauseMode)


@asynccontextmanager
async def serving(mode: PauseMode, **answers: bytes) -> AsyncIterator[tuple[CannedServer, EngineClient]]:
    """An engine that answers the calls of these names so, and all others with an empty object."""
    async with canned_server({f"/{name}": answer for name, answer in answers.items()}) as server:
        client = EngineClient("main-0", server.url, ClientConfig(), mode)
        yield server, client
        await client.close()


def loads(server: CannedServer) -> list[tuple[str, Any]]:
    """The calls that move weights: the probe, which stages nothing, is left out."""
    return [(path, body) for path, body in server.seen if body]


async def bring(client: EngineClient, source: WeightSource) -> bool:
    """Stage and swap as a publication does; returns whether the engine needed a pause."""
    await client.stage(source, VERSION)
    needs_pause = await client.needs_pause()
    await client.swap(source, VERSION)
    return needs_pause


@pytest.mark.parametrize("mode", MODES)
async def test_a_server_that_stages_gets_a_folder_twice_or_swaps_it_in_place_without_a_pause(mode: PauseMode) -> None:
    async with serving(mode) as (server, client):
        assert await bring(client, FOLDER) is mode.flushes_cache
    staged, swapped = loads(server)
    assert staged == ("/stage_weights", {"model_path": "/w", "weight_version": "0.4"})
    if mode is PauseMode.IN_PLACE:
        expected = {"weight_version": "0.4", "in_place": True, "flush_cache": False}
        assert swapped == ("/swap_weights", expected)
    else:
        expected = {"model_path": "/w", "weight_version": "0.4", "abort_all_requests": False, "flush_cache": True}
        assert swapped == ("/update_weights_from_disk", expected)


@pytest.mark.parametrize("mode", MODES)
async def test_a_server_that_does_not_stage_gets_a_folder_in_its_pause(mode: PauseMode) -> None:
    async with serving(mode, stage_weights=NOT_SERVED) as (server, client):
        assert await bring(client, FOLDER)
        assert await bring(client, FOLDER)
    assert server.paths().count("/stage_weights") == 1, "what it can is asked once"
    assert [path for path, _ in loads(server)] == ["/update_weights_from_disk"] * 2
    assert [body["flush_cache"] for _, body in loads(server)] == [mode.flushes_cache] * 2


@pytest.mark.parametrize("mode", MODES)
async def test_a_server_that_does_not_stage_gets_buckets_in_its_pause_and_the_last_one_is_named(
    mode: PauseMode,
) -> None:
    async with serving(mode, stage_weights=NOT_SERVED) as (server, client):
        assert await bring(client, MAPPED)
    assert server.paths()[1:] == ["/begin_weight_update", *["/update_weights_from_tensor"] * 2, "/end_weight_update"]
    assert [body for _, body in loads(server)] == [
        {"serialized_named_tensors": ["one", "two"], "flush_cache": False},
        {
            "serialized_named_tensors": ["three", "four"],
            "flush_cache": mode.flushes_cache,
            "weight_version": "0.4",
        },
    ]


async def test_a_server_that_stages_buckets_swaps_them_at_once() -> None:
    async with serving(PauseMode.ABORT) as (server, client):
        assert await bring(client, MAPPED)
    assert [path for path, _ in loads(server)] == ["/stage_weights", "/stage_weights", "/swap_weights"]
    assert loads(server)[-1][1] == {"weight_version": "0.4", "in_place": False, "flush_cache": True}


async def test_in_place_nothing_is_swapped_that_was_not_staged() -> None:
    async with serving(PauseMode.IN_PLACE) as (server, client):
        assert await client.needs_pause()
        await client.swap(FOLDER, VERSION)
        await client.stage(FOLDER, VERSION)
        assert not await client.needs_pause()
        await client.swap(FOLDER, VERSION.next())
    assert [path for path, _ in loads(server)] == [
        "/update_weights_from_disk", "/stage_weights", "/update_weights_from_disk",
    ]  # fmt: skip


async def test_after_a_failure_the_server_is_asked_anew_what_it_can() -> None:
    async with serving(PauseMode.IN_PLACE, swap_weights=json_answer({}, 500)) as (server, client):
        await client.stage(FOLDER, VERSION)
        with pytest.raises(EngineError, match="/swap_weights"):
            await client.swap(FOLDER, VERSION)
        assert await client.needs_pause()
        server.answers["/stage_weights"] = NOT_SERVED
        assert await bring(client, FOLDER)
    assert server.paths()[-1] == "/update_weights_from_disk"


async def test_a_bucket_that_is_refused_is_named_and_what_came_before_it_is_discarded() -> None:
    refused = json_answer({}, 400)
    async with serving(PauseMode.ABORT, stage_weights=NOT_SERVED, update_weights_from_tensor=refused) as (
        server,
        client,
    ):
        with pytest.raises(EngineError, match=r"^bucket 1 of 2: .*/update_weights_from_tensor"):
            await bring(client, MAPPED)
    assert server.seen[-1] == ("/end_weight_update", {"discard": True})


async def test_a_session_that_was_left_open_is_discarded_first() -> None:
    answers = {"stage_weights": NOT_SERVED, "begin_weight_update": json_answer({}, 400)}
    async with serving(PauseMode.ABORT, **answers) as (server, client):
        with pytest.raises(EngineError, match="/begin_weight_update"):
            await bring(client, MAPPED)
    assert server.seen[1:] == [
        ("/begin_weight_update", {}),
        ("/end_weight_update", {"discard": True}),
        ("/begin_weight_update", {}),
    ]


async def test_a_server_that_knows_no_sessions_is_updated_without_one() -> None:
    async with serving(PauseMode.ABORT, stage_weights=NOT_SERVED, begin_weight_update=NOT_SERVED) as (server, client):
        await bring(client, MAPPED)
    assert server.paths()[1:] == ["/begin_weight_update", *["/update_weights_from_tensor"] * 2]


@pytest.mark.parametrize("is_staging", [True, False])
async def test_a_bucket_that_is_not_sent_is_named_whether_or_not_the_server_stages(is_staging: bool) -> None:
    buckets = Bucket(("a",), ("float32",), ((2,),), 8), Bucket(("b",), ("float32",), ((2,),), 8)
    sent: list[int] = []

    async def send(index: int) -> None:
        sent.append(index)
        if index == 1:
            raise EngineError("the sender ended")

    answers = {} if is_staging else {"stage_weights": NOT_SERVED}
    async with serving(PauseMode.ABORT, **answers) as (_, client):
        with pytest.raises(EngineError, match=r"^bucket 2 of 2 \(b \.\.\.\): the sender ended"):
            await bring(client, BroadcastWeights("group", buckets, send))
    assert sent == [0, 1]


async def test_a_server_that_drained_is_paused_by_abort() -> None:
    async with serving(PauseMode.DRAIN) as (server, client):
        await client.pause()
    assert server.seen == [("/pause_generation", {"mode": "abort"})]


LOADS = {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}, {"num_running_reqs": 4, "num_waiting_reqs": 0}]}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"model_info": json_answer({"num_running": 0, "num_waiting": 0})}, 0),
        ({"model_info": json_answer({"num_running": 3, "num_waiting": 2})}, 5),
        ({"v1/loads": json_answer(LOADS)}, 7),
        ({"v1/loads": json_answer({"loads": []})}, 0),
        ({"v1/loads": NOT_SERVED}, None),
        ({"v1/loads": json_answer({"loads": [{"requests": 2}]})}, None),
        ({"v1/loads": json_answer({})}, None),
    ],
)
async def test_a_server_is_asked_how_many_requests_it_has_in_its_own_words(
    answers: dict[str, bytes], expected: int | None
) -> None:
    async with serving(PauseMode.DRAIN, **answers) as (_, client):
        assert await client.count_requests() == expected
