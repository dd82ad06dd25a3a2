from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from agentrl.engine.forward import PassRunner
from agentrl.engine.http import EngineApplication
from agentrl.engine.options import EngineOptions
from agentrl.engine.server import EngineServer

_DEADLINE_S = 20.0
GONE = {"type": "http.disconnect"}
LONG = {"input_ids": [20, 31, 42], "rid": "long", "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
ENDLESS = LONG | {"sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}


class Client:
    """One HTTP client as a server shows it to an application; takes responses only while it reads."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for event in events:
            self.events.put_nowait(event)
        self.got: list[dict[str, Any]] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, event: dict[str, Any]) -> None:
        await self.reads.wait()
        self.got.append(event)

    @property
    def status(self) -> int:
        return self.got[0]["status"]

    @property
    def bodies(self) -> list[bytes]:
        return [event["body"] for event in self.got[1:]]

    @property
    def answer(self) -> Any:
        (body,) = self.bodies
        assert (b"content-length", b"%d" % len(body)) in self.got[0]["headers"]
        return orjson.loads(body)


class Calls:
    """Calls to the application of an engine that steps."""

    def __init__(self, server: EngineServer, token: str | None) -> None:
        self.server, self.scheduler = server, server.scheduler
        self._application = EngineApplication(server, token)

    def start(self, route: str, client: Client, token: str = "") -> asyncio.Task[None]:
        method, path = route.split()
        headers = [(b"authorization", token.encode("latin-1"))] if token else []
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        return asyncio.create_task(self._application(scope, client.events.get, client.send))

    async def call(self, route: str, body: Any = None, token: str = "") -> Client:
        client = Client(_body(body if isinstance(body, bytes) else orjson.dumps(body or {})))
        await self.start(route, client, token)
        return client

    async def until_running(self, count: int) -> None:
        while self.scheduler.num_running != count:
            await asyncio.sleep(0)


@asynccontextmanager
async def _calling(model: Path, token: str | None = None) -> AsyncIterator[Calls]:
    calls = Calls(EngineServer(EngineOptions(model=model, port=1, max_running_requests=2)), token)
    steps = asyncio.create_task(calls.scheduler.run())
    async with asyncio.timeout(_DEADLINE_S):
        yield calls
    steps.cancel()


def _body(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


def _tokens(piece: bytes) -> list[int]:
    return orjson.loads(piece.removeprefix(b"data: "))["output_ids"]


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (("GET /health",), 200),
        (("GET /nowhere",), 404),
        (("GET /generate",), 404),
        (("POST /generate", {}), 400),
        (("POST /generate", b"["), 400),
        (("POST /pause_generation", b"[]"), 400),
        (("POST /pause_generation", {"mode": "drain"}), 400),
        (("POST /pause_generation", {"mode": ["abort"]}), 400),
        (("POST /pause_generation", {"mode": "abort"}), 200),
    ],
)
async def test_every_call_has_one_answer(tiny_model: Path, call: tuple[Any, ...], status: int) -> None:
    async with _calling(tiny_model) as calls:
        client = await calls.call(*call)
    assert client.status == status
    assert client.answer


async def test_a_body_that_comes_in_pieces_is_read_whole(tiny_model: Path) -> None:
    async with _calling(tiny_model) as calls:
        client = Client(_body(b'{"mode": "in_', more=True), _body(b'place"}'))
        await calls.start("POST /pause_generation", client)
        assert calls.scheduler.pause_mode == "in_place"


async def test_a_client_that_is_gone_before_its_body_is_whole_changes_nothing(tiny_model: Path) -> None:
    async with _calling(tiny_model) as calls:
        client = Client(_body(b'{"mode": "abort"}', more=True), GONE)
        await calls.start("POST /pause_generation", client)
        assert calls.scheduler.pause_mode is None
        assert client.got == []


async def test_an_unwell_engine_says_so_with_a_status_of_its_own(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _calling(tiny_model) as calls:
        monkeypatch.setattr(PassRunner, "computing_s", 400.0)
        client = await calls.call("GET /health")
    assert client.status == 503
    assert "for 400 s" in client.answer["error"]["message"]


async def test_only_control_calls_need_the_token(tiny_model: Path) -> None:
    async with _calling(tiny_model, "secret") as calls:
        assert (await calls.call("GET /model_info")).status == 200
        assert (await calls.call("POST /generate", LONG)).status == 200
        for token in ("", "Bearer", "Bearer secre", "secret", "Bearer sécret"):
            assert (await calls.call("POST /pause_generation", token=token)).status == 401
        assert calls.scheduler.pause_mode is None
        assert (await calls.call("POST /pause_generation", token="Bearer secret")).status == 200


async def test_a_handler_that_fails_ends_its_call_and_no_other(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with _calling(tiny_model) as calls:
        calls.scheduler.abort = None  # type: ignore[assignment, method-assign]
        failed = await calls.call("POST /abort_request", {"rid": "nobody"})
        assert failed.status == 500
        assert "its log says how" in failed.answer["error"]["message"]
        assert "TypeError: 'NoneType' object is not callable" in capsys.readouterr().err
        assert (await calls.call("POST /generate", LONG)).status == 200


async def test_a_fault_behind_the_first_piece_of_a_stream_is_an_event_of_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stream(*_arguments: Any) -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        raise ValueError("no such column")

    async with _calling(tiny_model) as calls:
        monkeypatch.setattr(calls.server.generation, "stream", stream)
        client = await calls.call("POST /generate", LONG | {"stream": True})
    assert client.status == 200
    assert client.bodies[0] == b"data: 1\n\n"
    assert "its log says how" in orjson.loads(client.bodies[1].removeprefix(b"data: "))["error"]["message"]
    assert "no such column" in capsys.readouterr().err


async def test_a_slow_reader_gets_no_piece_before_it_has_taken_the_last_and_then_the_newest(tiny_model: Path) -> None:
    async with _calling(tiny_model) as calls:
        client = Client(_body(orjson.dumps(LONG | {"stream": True})))
        client.reads.clear()
        task = calls.start("POST /generate", client)
        await calls.until_running(1)
        await calls.until_running(0)
        client.reads.set()
        await task
    first, last, done, end = client.bodies
    assert len(_tokens(first)) < 40
    assert len(_tokens(last)) == 40
    meta = orjson.loads(last.removeprefix(b"data: "))["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 40}
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 40}]
    assert (done, end) == (b"data: [DONE]\n\n", b"")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_hangs_up_has_its_request_ended(tiny_model: Path, is_streamed: bool) -> None:
    async with _calling(tiny_model) as calls:
        client = Client(_body(orjson.dumps(ENDLESS | {"stream": is_streamed})))
        task = calls.start("POST /generate", client)
        await calls.until_running(1)
        client.events.put_nowait(GONE)
        await task
        assert calls.scheduler.num_running == 0
    last = client.bodies[-3] if is_streamed else b"data: " + client.bodies[0]
    assert orjson.loads(last.removeprefix(b"data: "))["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(_tokens(last)) < 200
