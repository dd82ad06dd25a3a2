"""A server that answers every request with the same bytes, or with none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

HANGS = b"hangs"
HANGS_UP = b"hangs up"


@dataclass
class CannedServer:
    """`seen` holds path and body of each request, in order of arrival."""

    url: str = ""
    answers: dict[str, bytes] = field(default_factory=dict)
    seen: list[tuple[str, Any]] = field(default_factory=list)
    connections: int = 0

    def paths(self) -> list[str]:
        return [path for path, _ in self.seen]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ")[1].decode()
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
                self.seen.append((path, orjson.loads(body) if body else None))
                answer = self.answers.get(path, json_answer({}))
                if answer == HANGS_UP:
                    break
                if answer != HANGS:
                    writer.write(answer)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


def json_answer(value: Any, status: int = 200) -> bytes:
    return plain_answer(orjson.dumps(value), status)


def plain_answer(content: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(content), content)


@asynccontextmanager
async def canned_server(answers: dict[str, bytes]) -> AsyncIterator[CannedServer]:
    canned = CannedServer(answers=answers)
    server = await asyncio.start_server(canned.serve, "127.0.0.1", 0)
    canned.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield canned
    finally:
        server.close()
