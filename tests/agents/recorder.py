"""A server that answers agents by a script, in their dialect, and keeps every request that they send.

It stands where the gateway stands: behind a unix socket. What it knows of the dialects is what three agents need.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket as sockets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from agentrl.testing.scripted import Script
from agentrl.types.message import Message
from tests.agents import dialects

_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request as it came; `body` is None where there was none."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: dict[str, Any] | None
    size_bytes: int

    @property
    def key(self) -> str:
        """The API key that it bears."""
        return self.headers.get("x-api-key") or self.headers.get("authorization", "").removeprefix("Bearer ")


Fault = Callable[[Recorded, int], Response | None]
"""Answers instead of the script: given a request and how many calls of the model came before it."""


@dataclass(slots=True)
class Recorder:
    """What agents have asked, and what they were replied, in order."""

    script: Script
    fault: Fault | None = None
    silence_s: float = 0.0
    requests: list[Recorded] = field(default_factory=list)
    replies: list[tuple[Recorded, Message]] = field(default_factory=list)
    _ids: Iterator[int] = field(default_factory=itertools.count)

    def calls(self) -> list[Recorded]:
        """The requests that ask for a reply of the model."""
        return [request for request in self.requests if request.method == "POST" and request.path in dialects.ROUTES]

    async def answer(self, request: Request) -> Response:
        """Answer one request, and keep it."""
        raw = await request.body()
        body = json.loads(raw) if raw else None
        recorded = Recorded(request.method, request.url.path, request.url.query, dict(request.headers), body, len(raw))
        earlier = len(self.calls())
        self.requests.append(recorded)
        if (dialect := dialects.ROUTES.get(recorded.path)) is None or request.method != "POST" or body is None:
            return JSONResponse({"error": {"message": f"no route {recorded.path}", "type": "not_found_error"}}, 404)
        if self.fault is not None and (answer := self.fault(recorded, earlier)) is not None:
            return answer
        message = self.script(recorded.key, dialect.messages(body))
        self.replies.append((recorded, message))
        number = next(self._ids)
        if body.get("stream"):
            events = dialect.events(message, body, number)
            return StreamingResponse(self._streamed(events, dialect), media_type="text/event-stream")
        await asyncio.sleep(self.silence_s)
        return JSONResponse(dialect.reply(message, body, number))

    async def _streamed(self, events: list[str], dialect: dialects.Dialect) -> AsyncIterator[str]:
        for _ in range(int(self.silence_s)):
            yield dialect.keep_alive
            await asyncio.sleep(1)
        for event in events:
            yield event


@asynccontextmanager
async def recorded_agents(socket: Path, script: Script) -> AsyncIterator[Recorder]:
    """Serve at a unix socket, which anybody may use, for the block."""
    recorder = Recorder(script)
    app = FastAPI()
    app.add_api_route("/{path:path}", recorder.answer, methods=["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
    server = _Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    listener = sockets.socket(sockets.AF_UNIX)
    listener.bind(str(socket))
    socket.chmod(0o666)  # sandboxes run under user ids of their own
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="recorder")
    try:
        async with asyncio.timeout(_START_S):
            while not server.started:
                await asyncio.sleep(0.01)
        yield recorder
    finally:
        server.should_exit = True
        await serving
        socket.unlink()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
