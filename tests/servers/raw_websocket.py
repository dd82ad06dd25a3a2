"""A WebSocket client that does next to nothing, so that a benchmark measures the server: no library, no compression."""

from __future__ import annotations

import asyncio

_PING, _CLOSE = 0x9, 0x8
_KEY = "dGhlIHNhbXBsZSBub25jZQ=="


class RawConnection(asyncio.Protocol):
    """One connection, on which a text follows the answer to the one before."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._is_upgraded = False
        self._answer: asyncio.Future[bytes] | None = None
        self._early: list[bytes] = []
        self._end: str | None = None

    @classmethod
    async def open(cls, port: int, path: str) -> RawConnection:
        """A connection to a server here. Waits for: its upgrade. Unblocked by: it, or the connection's end."""
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_connection(cls, "127.0.0.1", port)
        connection._transport = transport
        connection._answer = loop.create_future()
        lines = (
            f"GET {path} HTTP/1.1",
            f"Host: 127.0.0.1:{port}",
            *("Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Key: {_KEY}", "Sec-WebSocket-Version: 13"),
        )
        transport.write("\r\n".join([*lines, "", ""]).encode())
        status = await connection._answer
        assert b" 101 " in status, status
        return connection

    async def ask(self, text: bytes) -> bytes:
        """The answer to a text."""
        self._transport.write(_frame(0x1, text))
        return await self.read()

    async def read(self) -> bytes:
        """The next text. Waits for: it. Unblocked by: it, or the connection's end, which is an error."""
        if self._early:
            return self._early.pop(0)
        if self._end is not None:
            raise ConnectionError(self._end)
        self._answer = asyncio.get_running_loop().create_future()
        return await self._answer

    def close(self) -> None:
        """End the connection."""
        self._transport.write(_frame(_CLOSE, b"\x03\xe8"))
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Take what came apart into frames."""
        self._buffer += data
        if not self._is_upgraded:
            head, found, rest = bytes(self._buffer).partition(b"\r\n\r\n")
            if not found:
                return
            self._is_upgraded, self._buffer = True, bytearray(rest)
            self._give(head.split(b"\r\n")[0])
        while (frame := self._next_frame()) is not None:
            opcode, payload = frame
            if opcode == _PING:
                self._transport.write(_frame(0xA, payload))
            elif opcode == _CLOSE:
                self._transport.close()
            else:
                self._give(payload)

    def connection_lost(self, error: Exception | None) -> None:
        """Whoever waits is told."""
        self._end = f"the server ended the connection: {error}"
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(self._end))

    def _give(self, payload: bytes) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(payload)
        else:
            self._early.append(payload)

    def _next_frame(self) -> tuple[int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        size, start = buffer[1] & 0x7F, 2
        if size >= 126:
            start = 4 if size == 126 else 10
            size = int.from_bytes(buffer[2:start], "big")
        if len(buffer) < start + size:
            return None
        opcode, payload = buffer[0] & 0x0F, bytes(buffer[start : start + size])
        del buffer[: start + size]
        return opcode, payload


def _frame(opcode: int, payload: bytes) -> bytes:
    """A client's frame under the mask of zeros, which leaves the payload as it is."""
    size = len(payload)
    head = bytes([0x80 | opcode])
    if size < 126:
        return head + bytes([0x80 | size]) + bytes(4) + payload
    return head + bytes([0x80 | 126]) + size.to_bytes(2, "big") + bytes(4) + payload
