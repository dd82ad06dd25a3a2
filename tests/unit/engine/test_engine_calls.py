from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from agentrl.engine.calls import CallServer
from agentrl.engine.forward import PassRunner
from agentrl.engine.link import Kind, Link, Message
from agentrl.engine.options import EngineOptions
from agentrl.engine.server import EngineServer

_DEADLINE_S = 20.0
LONG = {"input_ids": [20, 31, 42], "rid": "long", "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}


class Caller:
    """A front that a test plays, of an engine that steps."""

    def __init__(self, server: EngineServer, token: str | None) -> None:
        self.server = server
        self.calls = CallServer(server, token)
        self.heard: asyncio.Queue[Message] = asyncio.Queue()
        self.link = Link(self.heard.put_nowait, lambda: None)

    def call(self, number: int, route: str, body: Any = None, token: str = "") -> None:
        data = body if isinstance(body, bytes) else orjson.dumps(body or {})
        self.link.send(Message(Kind.CALL, number, f"{token}\n{route}", data))

    async def next(self) -> Message:
        async with asyncio.timeout(_DEADLINE_S):
            return await self.heard.get()

    async def answer(self, *call: Any, **more: Any) -> tuple[str, Any]:
        self.call(1, *call, **more)
        message = await self.next()
        assert (message.kind, message.call) == (Kind.ANSWER, 1)
        return message.note, orjson.loads(message.body) if message.body else None


@asynccontextmanager
async def _calling(model: Path, token: str | None = None) -> AsyncIterator[Caller]:
    caller = Caller(EngineServer(EngineOptions(model=model, port=1, max_running_requests=2)), token)
    loop = asyncio.get_running_loop()
    for link, end in zip((caller.calls.link, caller.link), socket.socketpair(), strict=True):
        await loop.create_unix_connection(lambda link=link: link, sock=end)
    steps = asyncio.create_task(caller.server.scheduler.run())
    yield caller
    steps.cancel()
    caller.link.close()
    async with asyncio.timeout(_DEADLINE_S):
        await caller.calls.ended.wait()


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (("GET /health",), "200"),
        (("POST /abort_request", {"rid": "nobody"}), "200"),
        (("GET /nowhere",), "404"),
        (("GET /generate",), "404"),
        (("POST /generate", {}), "400"),
        (("POST /generate", b"["), "400"),
        (("POST /pause_generation", b"[]"), "400"),
    ],
)
async def test_every_call_has_one_answer(tiny_model: Path, call: tuple[Any, ...], status: str) -> None:
    async with _calling(tiny_model) as caller:
        assert (await caller.answer(*call))[0] == status
        assert caller.heard.empty()


async def test_an_unwell_engine_says_so_with_a_status_of_its_own(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _calling(tiny_model) as caller:
        monkeypatch.setattr(PassRunner, "computing_s", 400.0)
        status, answer = await caller.answer("GET /health")
    assert status == "503"
    assert "for 400 s" in answer["error"]["message"]


async def test_only_control_calls_need_the_token(tiny_model: Path) -> None:
    async with _calling(tiny_model, "secret") as caller:
        assert (await caller.answer("GET /model_info"))[0] == "200"
        assert (await caller.answer("POST /generate", LONG))[0] == "200"
        for token in ("", "Bearer", "Bearer secre", "secret", "Bearer sécret"):
            assert (await caller.answer("POST /pause_generation", token=token))[0] == "401"
        assert caller.server.scheduler.pause_mode is None
        assert (await caller.answer("POST /pause_generation", token="Bearer secret"))[0] == "200"


async def test_a_handler_that_fails_ends_its_call_and_no_other(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with _calling(tiny_model) as caller:
        caller.server.scheduler.abort = None  # type: ignore[assignment, method-assign]
        status, answer = await caller.answer("POST /abort_request", {"rid": "nobody"})
        assert status == "500"
        assert "its log says how" in answer["error"]["message"]
        assert "TypeError: 'NoneType' object is not callable" in capsys.readouterr().err
        assert (await caller.answer("POST /generate", LONG))[0] == "200"


async def test_a_slow_reader_gets_no_piece_before_it_has_taken_the_last_and_then_the_newest(tiny_model: Path) -> None:
    async with _calling(tiny_model) as caller:
        caller.call(7, "POST /generate", LONG | {"stream": True})
        first = await caller.next()
        assert len(_tokens(first)) < 40
        async with asyncio.timeout(_DEADLINE_S):
            while caller.server.scheduler.num_running:
                await asyncio.sleep(0)
        assert caller.heard.empty()
        caller.link.send(Message(Kind.TAKEN, 7))
        assert len(_tokens(await caller.next())) == 40
        caller.link.send(Message(Kind.TAKEN, 7))
        assert (await caller.next()).body == b"data: [DONE]\n\n"
        caller.link.send(Message(Kind.TAKEN, 7))
        assert await caller.next() == Message(Kind.ANSWER, 7, "200")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_hangs_up_has_its_request_ended(tiny_model: Path, is_streamed: bool) -> None:
    async with _calling(tiny_model) as caller:
        endless = LONG | {"sampling_params": {"max_new_tokens": 200, "ignore_eos": True}, "stream": is_streamed}
        caller.call(7, "POST /generate", endless)
        while not caller.server.scheduler.num_running:
            await asyncio.sleep(0)
        caller.link.send(Message(Kind.HANGUP, 7))
        while (message := await caller.next()).kind is Kind.PIECE:
            pass
        assert (message.kind, message.call) == (Kind.ANSWER, 7)
        assert caller.server.scheduler.num_running == 0
        if not is_streamed:
            assert orjson.loads(message.body)["meta_info"]["finish_reason"]["type"] == "abort"


def _tokens(piece: Message) -> list[int]:
    assert piece.kind is Kind.PIECE
    return orjson.loads(piece.body.removeprefix(b"data: "))["output_ids"]
