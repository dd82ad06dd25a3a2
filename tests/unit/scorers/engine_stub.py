"""A server of SGLang's protocol that answers as a test tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = tuple[int, Any]


@dataclass
class EngineStub:
    """`info` is what ``/model_info`` shows; `answer` makes status and JSON of a path and a body."""

    info: dict[str, Any]
    answer: Callable[[str, dict[str, Any]], Answer]
    url: str = ""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        path = head.split()[1]
        length = next((int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        if path == "/model_info":
            status, answer = 200, self.info
        else:
            self.asked.append((path, body))
            status, answer = self.answer(path, body)
        content = json.dumps(answer).encode()
        writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n".encode())
        writer.write(content)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def running(stub: EngineStub) -> AsyncIterator[EngineStub]:
    """The stub behind a port of its own."""
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
    stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield stub


def embedding(body: dict[str, Any], *numbers: float, label: str = "1.0") -> Answer:
    """A head's answer to a request."""
    meta = {"id": body["rid"], "prompt_tokens": len(body["input_ids"]), "weight_version": label}
    return 200, {"embedding": list(numbers), "meta_info": meta}
