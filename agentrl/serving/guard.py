"""Who may come in: bearer tokens and the size of requests, before anything else sees them."""

from __future__ import annotations

import secrets

from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_OPEN_PATHS = frozenset({"/health"})


class Guard:
    """An ASGI application before another: it passes what bears the token and is not too large.

    Whether the server is well is told to anybody.
    """

    def __init__(self, app: ASGIApp, token: str | None, max_message_bytes: int) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._max_bytes = max_message_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await refusal(scope, receive, send)
        elif scope["type"] == "http":
            await self._app(scope, _Bounded(receive, self._max_bytes).receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> Response | None:
        given = headers.get(b"authorization", b"")
        if self._expected and path not in _OPEN_PATHS and not secrets.compare_digest(given, self._expected):
            return _error(401, "this server wants its bearer token, the content of its --token-file", "Bearer")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_bytes:
            return _error(
                413,
                f"the body is over {self._max_bytes} bytes; start the server with a greater --max-message-mb",
            )
        return None


class _Bounded:
    """A request's body, cut off where it gets too large: its length need not have been told."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive, self._left = receive, max_bytes

    async def receive(self) -> Message:
        event = await self._receive()
        self._left -= len(event.get("body", b""))
        return event if self._left >= 0 else {"type": "http.disconnect"}


def _error(status: int, message: str, challenge: str | None = None) -> Response:
    headers = {} if challenge is None else {"www-authenticate": challenge}
    return JSONResponse({"detail": message}, status, headers)
