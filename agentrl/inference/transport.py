"""An HTTP transport for hundreds of requests in flight to one host, and how its answers are read.

httpx's own pool looks at every connection whenever a request comes or goes, which costs most of a core at
64 requests in flight. Here each connection is a lane of its own, and an idle lane is found at once.
"""

from __future__ import annotations

import ssl
from typing import Any

import httpx
import orjson

# SGLang closes a connection that was idle for five seconds; a request sent at that moment would be lost, and with
# it an episode on an engine that has nothing wrong with it.
KEEP_ALIVE_S = 2.0


class LaneTransport(httpx.AsyncBaseTransport):
    """Keeps one-connection transports and reuses the one that was idle last.

    Answers are read whole before their lane is idle again, so responses need not be closed. A lane whose
    request was cancelled or failed is closed, since its connection may be in any state.
    """

    def __init__(self, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        """A lane that was idle for longer than `keep_alive_s` opens a new connection."""
        self._limits = httpx.Limits(max_connections=1, keepalive_expiry=keep_alive_s)
        self._tls = ssl.create_default_context()
        self._idle: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read its whole answer. Raises httpx.HTTPError."""
        lane = self._idle.pop() if self._idle else self._open_lane()
        try:
            response = await lane.handle_async_request(request)
            await response.aread()
        except BaseException:
            await lane.aclose()
            raise
        self._idle.append(lane)
        return response

    async def aclose(self) -> None:
        """Close idle lanes; safe to call twice."""
        lanes, self._idle = self._idle, []
        for lane in lanes:
            await lane.aclose()

    def _open_lane(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=self._limits)


def decoded(response: httpx.Response) -> Any:
    """The JSON of an answer, None if it is none."""
    try:
        return orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return None


def error_text(response: httpx.Response) -> str:
    """What a refusal says, in any of SGLang's forms. Example: ``HTTP 400: too hot``."""
    body = decoded(response)
    if body is None:
        return f"HTTP {response.status_code}: {response.text[:300]}".rstrip(": ")
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return f"HTTP {response.status_code}: {message}"
