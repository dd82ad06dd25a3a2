"""What a relay carries between a program and a gateway, both played by sockets of the test."""

from __future__ import annotations

import asyncio
import random
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from agentrl.sandbox.relay import CONNECT_S, Relay, to_unix_socket

pytestmark = pytest.mark.timeout(600)
Gateway = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def relayed(gateway: Gateway) -> AsyncIterator[int]:
    """The port by which a gateway is reached."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path, relay, listener = f"{folder}/socket", Relay(), socket.create_server(("127.0.0.1", 0))
        async with await asyncio.start_unix_server(gateway, path, backlog=1000):
            await relay.listen(listener, to_unix_socket(path))
            yield listener.getsockname()[1]
            relay.end()


async def test_many_connections_are_open_at_once_and_each_has_its_own_answer() -> None:
    most, there, all_there = 300, 0, asyncio.Event()

    async def gateway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal there
        said = await reader.readline()
        there += 1
        if there == most:
            all_there.set()
        await all_there.wait()
        writer.write(b"to " + said)
        writer.close()

    async def program(port: int, number: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"%d\n" % number)
        answer = await reader.read()
        writer.close()
        return answer

    async with relayed(gateway) as port:
        answers = await asyncio.gather(*(program(port, number) for number in range(most)))
    assert answers == [b"to %d\n" % number for number in range(most)]


async def test_megabytes_arrive_unchanged_in_both_directions_at_once() -> None:
    up, down = (random.Random(seed).randbytes(8 << 20) for seed in (1, 2))
    arrived: list[bytes] = []

    async def gateway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(down)
        arrived.append(await reader.readexactly(len(up)))
        await writer.drain()
        writer.close()

    async with relayed(gateway) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(up)
        assert await reader.read(-1) == down
        writer.close()
    assert arrived == [up]


async def test_a_program_that_has_said_all_still_hears_the_answer() -> None:
    async def gateway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"heard " + await reader.read(-1))
        writer.close()

    async with relayed(gateway) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"all")
        writer.write_eof()
        assert await reader.read() == b"heard all"
        writer.close()


async def test_a_gateway_that_has_said_all_still_hears_the_program() -> None:
    heard = asyncio.get_running_loop().create_future()

    async def gateway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"first")
        writer.write_eof()
        heard.set_result(await reader.read(-1))
        writer.close()

    async with relayed(gateway) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b"first"
        writer.write(b"second")
        writer.close()
        assert await heard == b"second"


async def test_a_program_that_hangs_up_in_the_midst_of_a_stream_is_noticed_by_the_gateway() -> None:
    noticed = asyncio.Event()

    async def gateway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(b"data: more\n\n")
                await writer.drain()
                await asyncio.sleep(0.01)
        except OSError:
            noticed.set()

    async with relayed(gateway) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.readline()
        writer.transport.abort()
        await noticed.wait()


async def test_without_a_gateway_a_connection_ends_and_the_next_one_is_taken() -> None:
    relay, listener = Relay(), socket.create_server(("127.0.0.1", 0))
    await relay.listen(listener, to_unix_socket("/no/such/socket"))
    for _ in range(2):
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
        assert await reader.read() == b""
        writer.close()
    relay.end()


@pytest.mark.long
async def test_a_stream_may_be_silent_for_longer_than_a_connection_may_take() -> None:
    async def gateway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"data: first\n")
        await asyncio.sleep(CONNECT_S + 5)
        writer.write(b"data: last\n")
        writer.close()

    async with relayed(gateway) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b"data: first\ndata: last\n"
        writer.close()
