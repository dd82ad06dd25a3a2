"""HTTP to one engine: the only module that knows an HTTP library, and how answers are read.

The library is aiohttp: with hundreds of requests in flight a request takes a third of the processor time that it takes
with httpx, whose share of a run's driver was half (measured by the benchmark `learning_vs_trl`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

# SGLang closes a connection that was idle for five seconds; a request sent at that moment would be lost, and with
# it an episode on an engine that has nothing wrong with it.
KEEP_ALIVE_S = 2.0
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The body as text, whatever it is."""
        return self.body.decode(errors="replace")


class NoAnswerError(Exception):
    """No whole answer has come; `is_delivered` is False if the request certainly did not reach the engine."""

    def __init__(self, message: str, is_delivered: bool) -> None:
        super().__init__(message)
        self.is_delivered = is_delivered


class HttpConnections:
    """Connections to one base URL, as many as there are requests in flight.

    A connection whose request was cancelled or failed is closed, since it may be in any state.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], connect_s: float, keep_alive_s: float = KEEP_ALIVE_S
    ) -> None:
        """A connection that was idle for longer than `keep_alive_s` is not used again."""
        self._url, self._headers = url.rstrip("/"), dict(headers)
        self._connect_s, self._keep_alive_s = connect_s, keep_alive_s
        self._session: aiohttp.ClientSession | None = None
        self.is_closed = False

    async def request(self, method: str, path: str, body: bytes | None = None) -> Answer:
        """Send a request and read its whole answer; the caller sets the deadline. Raises NoAnswerError."""
        # An engine that was replaced has closed connections: to who still holds them, it is unreachable.
        if self.is_closed:
            raise NoAnswerError("the connection was closed because the engine ended", is_delivered=False)
        session = self._opened()
        try:
            async with session.request(method, self._url + path, data=body, allow_redirects=False) as response:
                headers = {name.lower(): value for name, value in response.headers.items()}
                return Answer(response.status, headers, await response.read())
        except aiohttp.ClientError as error:
            never = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            raise NoAnswerError(f"{type(error).__name__} {error}".rstrip(), is_delivered=not never) from error
        except ConnectionError as error:
            raise NoAnswerError(f"{type(error).__name__} {error}".rstrip(), is_delivered=True) from error

    async def close(self) -> None:
        """Close all connections; safe to call twice."""
        self.is_closed = True
        if self._session is not None:
            with suppress(TimeoutError):  # a peer that reads nothing does not keep anybody from ending
                async with asyncio.timeout(_CLOSE_S):
                    await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        # Not before the first request, since a session belongs to the loop in which it is made.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keep_alive_s),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def decoded(answer: Answer) -> Any:
    """The JSON of an answer, None if it is none."""
    try:
        return orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return None


def error_text(answer: Answer) -> str:
    """What a refusal says, in any of SGLang's forms. Example: ``HTTP 400: too hot``."""
    body = decoded(answer)
    if body is None:
        return f"HTTP {answer.status}: {answer.text[:300]}".rstrip(": ")
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return f"HTTP {answer.status}: {message}"
