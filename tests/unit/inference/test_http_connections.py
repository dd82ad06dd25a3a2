"""Connections are kept as long as a server certainly keeps them, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvicorn

from agentrl.inference.transport import KEEP_ALIVE_S, HttpConnections, decoded

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, list[int]]]:
    """Answers every request on a connection; gives its URL and, for each connection, how many it answered."""
    answered: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(answered)
        answered.append(0)
        while await reader.readline():
            while (await reader.readline()).strip():
                pass
            answered[number] += 1
            writer.write(ANSWER)
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", answered


@pytest.mark.parametrize(("keep_alive_s", "connections"), [(60.0, [3]), (-1.0, [1, 1, 1])])
async def test_a_connection_that_was_idle_for_too_long_is_not_used_again(
    server: tuple[str, list[int]], keep_alive_s: float, connections: list[int]
) -> None:
    url, answered = server
    http = HttpConnections(url, {}, connect_s=5.0, keep_alive_s=keep_alive_s)
    for _ in range(3):
        assert decoded(await http.request("GET", "/model_info")) == {}
    await http.close()
    assert answered == connections


def test_connections_are_given_up_well_before_a_server_does() -> None:
    assert uvicorn.Config("app").timeout_keep_alive > 2 * KEEP_ALIVE_S
