"""A proxy of faults: stands before an engine, and does to calls and answers what networks and gateways do to them.

Behind each fault it keeps what the engine really answered, so that a test can tell which tokens are whose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlsplit

import orjson

_DROPPED_HEADERS = (b"connection", b"transfer-encoding", b"content-length", b"host")

T = TypeVar("T")


class ProxyFault(StrEnum):
    """What befalls a call or its answer; but for `LOST_CALL` and the three statuses the call is delivered.

    CUT: half the answer, then the end of the connection. DELAYED: the answer comes late. DOUBLED: the call is
    delivered twice, and the second answer given. SWAPPED: two calls in flight get each other's answers. REPLAYED: the
    answer is one that another call got earlier. EMPTIED: status 200 and nothing else. LOST_ANSWER, LOST_CALL: the
    connection ends without an answer. SILENT: the connection stays, and no answer comes. BAD_GATEWAY is status 502,
    UNAVAILABLE 503, BUSY 503 with the header Retry-After.
    """

    CUT = "cut"
    DELAYED = "delayed"
    DOUBLED = "doubled"
    SWAPPED = "swapped"
    REPLAYED = "replayed"
    EMPTIED = "emptied"
    LOST_ANSWER = "lost_answer"
    LOST_CALL = "lost_call"
    SILENT = "silent"
    BAD_GATEWAY = "bad_gateway"
    UNAVAILABLE = "unavailable"
    BUSY = "busy"


_STATUSES = {
    ProxyFault.BAD_GATEWAY: HTTPStatus.BAD_GATEWAY,
    ProxyFault.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    ProxyFault.BUSY: HTTPStatus.SERVICE_UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """The next `times` calls of a path, of those whose request id begins with `rid`, suffer a fault.

    `seconds` are how late a DELAYED answer comes, when a BUSY engine wants to be asked again, and how long a SWAPPED
    answer waits for another one.

    Example: ``Rule(ProxyFault.LOST_ANSWER, "/continue_generation")``.
    """

    fault: ProxyFault
    path: str = "/generate"
    times: int = 1
    seconds: float = 1.0
    rid: str = ""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A generation that the engine has answered; `is_passed_on` is False where a fault kept it from who had asked."""

    body: dict[str, Any]
    answer: dict[str, Any]
    is_passed_on: bool


@dataclass(slots=True)
class _Armed:
    rule: Rule
    left: int
    struck: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class _Call:
    method: bytes
    path: str
    headers: tuple[bytes, ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    headers: tuple[bytes, ...] = ()

    def encoded(self) -> bytes:
        lines = [b"HTTP/1.1 %d -" % self.status, *self.headers, b"content-length: %d" % len(self.body)]
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


_Held = tuple[_Answer, asyncio.Future[_Answer]]


class FaultProxy:
    """Passes calls on to the engine at `engine_url`, each by a connection of its own, and strikes them as told.

    Example::

        proxy = FaultProxy("http://127.0.0.1:30000")
        await proxy.start()
        client = EngineClient("main-0", proxy.url, ClientConfig())
        await proxy.arm(Rule(ProxyFault.CUT)).wait()
    """

    def __init__(self, engine_url: str) -> None:
        place = urlsplit(engine_url)
        self._host, self._engine_port = place.hostname or "127.0.0.1", place.port or 80
        self._port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._armed: list[_Armed] = []
        self._held: _Held | None = None
        self._given: list[tuple[str, _Answer]] = []
        self.exchanges: list[Exchange] = []

    @property
    def url(self) -> str:
        """Where the proxy answers, the same after each start."""
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Listen; after a `stop` on the same port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, limit=1 << 26)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """End all connections and listen no more, as an engine that is dead; safe to call twice."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    def arm(self, rule: Rule) -> asyncio.Event:
        """Strike by a rule from now on; the event is set when it has struck as often as it says."""
        self._armed.append(_Armed(rule, rule.times))
        return self._armed[-1].struck

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Waits for: calls of one connection. Unblocked by: its end, a fault that ends it, or `stop`."""
        self._writers.add(writer)
        try:
            while (call := await _read_call(reader)) is not None and await self._handle(call, reader, writer):
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # either side is gone
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _handle(self, call: _Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one call; False if the connection is to end."""
        rule = self._strike(call)
        fault = rule.fault if rule else None
        if fault is ProxyFault.LOST_CALL:
            return False
        if rule is not None and fault in _STATUSES:
            again = (b"retry-after: %d" % max(round(rule.seconds), 1),) if fault is ProxyFault.BUSY else ()
            writer.write(_Answer(_STATUSES[fault], b"", again).encoded())
            return True
        answer = await self._until_hangup(self._forward(call), reader)
        if answer is not None and fault is ProxyFault.DOUBLED:
            answer = await self._until_hangup(self._forward(call), reader)
        if answer is None:
            return False
        self._note(call, answer, fault in (None, ProxyFault.DELAYED, ProxyFault.DOUBLED))
        whole = answer.encoded()
        struck = whole if rule is None else await self._until_hangup(self._spoil(rule, call, answer), reader)
        if struck is None:
            return False
        writer.write(struck)
        return fault is not ProxyFault.CUT

    async def _spoil(self, rule: Rule, call: _Call, answer: _Answer) -> bytes | None:
        """What the client gets in place of an answer; None for nothing."""
        match rule.fault:
            case ProxyFault.CUT:
                return answer.encoded()[: -len(answer.body) // 2]
            case ProxyFault.DELAYED:
                await asyncio.sleep(rule.seconds)
            case ProxyFault.EMPTIED:
                return _Answer(HTTPStatus.OK, b"").encoded()
            case ProxyFault.REPLAYED:
                answer = self._earlier(call) or answer
            case ProxyFault.SWAPPED:
                answer = await self._swap(answer, rule.seconds)
            case ProxyFault.LOST_ANSWER:
                return None
            case ProxyFault.SILENT:
                await asyncio.Event().wait()
        return answer.encoded()

    async def _swap(self, answer: _Answer, seconds: float) -> _Answer:
        """The answer to another call, which gets this one.

        Waits for: the other one. Unblocked by: it, or `seconds`, after which there is nothing to swap with.
        """
        if self._held is not None and not self._held[1].done():
            other, waiting = self._held
            self._held = None
            waiting.set_result(answer)
            return other
        waiting = asyncio.get_running_loop().create_future()
        self._held = answer, waiting
        try:
            async with asyncio.timeout(seconds):
                return await waiting
        except TimeoutError:
            return answer

    def _strike(self, call: _Call) -> Rule | None:
        for armed in self._armed:
            rule = armed.rule
            is_meant = call.path == rule.path and (not rule.rid or _rid(call).startswith(rule.rid))
            if not is_meant or (rule.fault is ProxyFault.REPLAYED and self._earlier(call) is None):
                continue
            armed.left -= 1
            if armed.left == 0:
                self._armed.remove(armed)
                armed.struck.set()
            return rule
        return None

    def _earlier(self, call: _Call) -> _Answer | None:
        return next((answer for rid, answer in self._given if rid != _rid(call)), None)

    def _note(self, call: _Call, answer: _Answer, is_passed_on: bool) -> None:
        """Keep what the engine generated."""
        if call.path != "/generate" or answer.status != HTTPStatus.OK:
            return
        exchange = Exchange(orjson.loads(call.body), orjson.loads(answer.body), is_passed_on)
        self.exchanges.append(exchange)
        if exchange.answer.get("output_ids"):
            self._given.append((_rid(call), answer))

    async def _forward(self, call: _Call) -> _Answer:
        """The engine's answer. Raises OSError or IncompleteReadError if there is none."""
        reader, writer = await asyncio.open_connection(self._host, self._engine_port, limit=1 << 26)
        try:
            length = b"content-length: %d" % len(call.body)
            host = b"host: %b:%d" % (self._host.encode(), self._engine_port)
            head = (call.method + b" " + call.path.encode() + b" HTTP/1.1", host, b"connection: close", length)
            writer.write(b"\r\n".join((*head, *call.headers)) + b"\r\n\r\n" + call.body)
            first, headers = await _read_head(reader)
            body = await reader.readexactly(_length(headers))
            return _Answer(int(first.split(b" ")[1]), body, _kept(headers))
        finally:
            writer.close()

    async def _until_hangup(self, work: Coroutine[Any, Any, T], reader: asyncio.StreamReader) -> T | None:
        """What comes of `work`; None if the client hangs up first. Unblocked by: either."""
        working = asyncio.ensure_future(work)
        hangup = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({working, hangup}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            for task in (working, hangup):
                task.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await hangup


async def _read_call(reader: asyncio.StreamReader) -> _Call | None:
    """The next call of a connection; None at its end."""
    try:
        first, headers = await _read_head(reader)
    except asyncio.IncompleteReadError:
        return None
    method, path, _ = first.split(b" ")
    return _Call(method, path.decode(), _kept(headers), await reader.readexactly(_length(headers)))


async def _read_head(reader: asyncio.StreamReader) -> tuple[bytes, list[bytes]]:
    first, *headers = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    return first, headers


def _length(headers: list[bytes]) -> int:
    values = [line.partition(b":")[2] for line in headers if line.lower().startswith(b"content-length:")]
    return int(values[0]) if values else 0


def _kept(headers: list[bytes]) -> tuple[bytes, ...]:
    """Headers that are not the connection's own."""
    return tuple(line for line in headers if line.partition(b":")[0].strip().lower() not in _DROPPED_HEADERS)


def _rid(call: _Call) -> str:
    return str(orjson.loads(call.body).get("rid"))
