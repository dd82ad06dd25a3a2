"""What a run finds at engines that others use too, and how it leaves them."""

from __future__ import annotations

import asyncio
import logging

import pytest

from agentrl.inference import ownership
from agentrl.inference.client import EngineClient
from agentrl.inference.config import AttachedEngineConfig, ClientConfig
from agentrl.orchestration.engines import Attachment, let_go, wait_for_answer
from agentrl.types.errors import EngineError
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import PauseMode
from tests.unit.inference.canned_server import HANGS, CannedServer, canned_server, json_answer, plain_answer

CLIENT = ClientConfig()
OURS, THEIRS, PAUSED = ({"weight_version": label, "paused": None} for label in ("0.3@ours", "0.3@theirs", "0.3@ours"))
PAUSED = PAUSED | {"paused": "abort"}
TOLD = ("/pause_generation", "/continue_generation", "/update_weight_version", "/flush_cache")


def _told(server: CannedServer) -> list[str]:
    return [path for path in server.paths() if path in TOLD]


async def test_an_engine_that_was_left_in_mid_pause_generates_before_another_run_can_have_it() -> None:
    async with canned_server({"/model_info": json_answer(OURS)}) as server:
        engine = EngineClient("main-0", server.url, CLIENT, mark="ours")
        await engine.pause()
        await let_go(engine)
    assert _told(server) == ["/pause_generation", "/continue_generation", "/update_weight_version"]


async def test_a_pause_that_was_cut_off_before_its_answer_is_ended_too() -> None:
    async with canned_server({"/model_info": json_answer(OURS), "/pause_generation": HANGS}) as server:
        engine = EngineClient("main-0", server.url, CLIENT, mark="ours")
        pausing = asyncio.create_task(engine.pause())
        while "/pause_generation" not in server.paths():
            await asyncio.sleep(0)
        pausing.cancel()
        await asyncio.wait([pausing])
        await let_go(engine)
    assert _told(server) == ["/pause_generation", "/continue_generation", "/update_weight_version"]


async def test_an_engine_that_generates_is_only_given_its_label_back() -> None:
    async with canned_server({"/model_info": json_answer(OURS)}) as server:
        engine = EngineClient("main-0", server.url, CLIENT, mark="ours")
        await engine.pause()
        await engine.resume()
        await let_go(engine)
    assert _told(server)[2:] == ["/update_weight_version"]


async def test_an_engine_that_another_run_has_by_now_is_left_as_that_run_paused_it() -> None:
    async with canned_server({"/model_info": json_answer(OURS)}) as server:
        engine = EngineClient("main-0", server.url, CLIENT, mark="ours")
        await engine.pause()
        server.answers["/model_info"] = json_answer(THEIRS)
        await let_go(engine)
    assert _told(server) == ["/pause_generation"]


async def _attached(answers: dict[str, bytes]) -> list[str]:
    """What an engine with these answers is told when a run takes it."""
    config = AttachedEngineConfig(urls=["http://engine"], start_s=60.0)
    async with canned_server(answers) as server:
        attachment = Attachment("main-0", server.url, config, CLIENT, PauseMode.ABORT, PolicyVersion(0, 3), "ours")
        await (await attachment.attach()).close()
    return _told(server)


TAKEN = ["/update_weight_version", "/continue_generation", "/flush_cache"]


@pytest.mark.parametrize(
    ("answers", "is_paused"),
    [
        ({"/model_info": json_answer(OURS)}, False),
        ({"/model_info": json_answer(PAUSED)}, True),
        ({"/model_info": json_answer({"weight_version": "0.3@ours"})}, False),
        ({"/model_info": json_answer({"weight_version": "0.3@ours"}), "/health": HANGS}, True),
    ],
)
async def test_a_run_says_that_an_engine_was_left_paused_and_lets_it_generate_with_an_empty_cache(
    answers: dict[str, bytes], is_paused: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answers.get("/health") == HANGS:
        monkeypatch.setattr(ownership, "_HEALTH_S", 0.2)
    caplog.set_level(logging.WARNING)
    assert await _attached({"/flush_cache": plain_answer(b"Cache flushed."), **answers}) == TAKEN
    assert ("left paused" in caplog.text) is is_paused


async def test_an_engine_whose_cache_others_hold_yet_is_taken() -> None:
    refusal = json_answer({"error": {"message": "Flush cache failed"}}, 400)
    assert await _attached({"/model_info": json_answer(OURS), "/flush_cache": refusal}) == TAKEN


async def test_whoever_waits_for_an_engine_that_hangs_says_so_before_its_first_answer_is_due(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with canned_server({"/model_info": HANGS}) as server:
        engine = EngineClient("main-0", server.url, ClientConfig(control_s=600.0))
        waiting = asyncio.create_task(wait_for_answer(engine, 600.0))
        async with asyncio.timeout(120):
            while "does not answer" not in caplog.text:
                await asyncio.sleep(0.05)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])
        await engine.close()
    assert f"engine main-0 at {server.url} does not answer; waiting for it since " in caplog.text
    assert "s more (engine.start_s = 600)" in caplog.text


async def test_an_engine_that_hangs_is_waited_for_no_longer_than_the_recipe_says() -> None:
    async with canned_server({"/model_info": HANGS}) as server:
        engine = EngineClient("main-0", server.url, ClientConfig(control_s=600.0))
        with pytest.raises(EngineError, match=r"has not answered for 0.2 s .*; start it there, or correct engine.urls"):
            await wait_for_answer(engine, 0.2)
        await engine.close()
