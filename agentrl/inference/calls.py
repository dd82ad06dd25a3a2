"""HTTP calls to one engine: deadlines, errors that name it, and calls that are sent again until they are answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

import orjson

from agentrl.inference.config import ClientConfig
from agentrl.inference.transport import Answer, HttpConnections, NoAnswerError, decoded, error_text
from agentrl.types.errors import Boundary, EngineBusyError, EngineError, EngineRefusedError, EpisodeError

GATEWAY_STATUSES = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
"""What a proxy says in place of an engine that gave it no answer."""
LONGEST_RETRY_AFTER_S = 30.0
_DEFAULT_RETRY_AFTER_S = 1.0
_DUPLICATE = "duplicate request id"
_FIRST_PAUSE_S = 0.05
_NOTHING = (b"", b"null")  # what a server says that has done something and has nothing to tell


class LostAnswerError(EngineError):
    """A control call had no answer; whether it reached the engine is not known."""


class EngineHttp:
    """The connections to one engine.

    `repeated` counts, by path, control calls that were sent again because their answer was lost.
    """

    def __init__(self, name: str, url: str, config: ClientConfig, token: str | None) -> None:
        self.repeated: Counter[str] = Counter()
        self._name, self._url, self._config = name, url, config
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._http = HttpConnections(url, {**headers, "content-type": "application/json"}, config.connect_s)

    async def post(self, path: str, body: bytes, deadline_s: float) -> Answer:
        """Any answer, whatever its status. Raises NoAnswerError or TimeoutError."""
        async with asyncio.timeout(deadline_s):
            return await self._http.request("POST", path, body)

    async def get(self, path: str) -> Answer:
        """Any answer, whatever its status. Raises EngineError."""
        try:
            async with asyncio.timeout(self._config.control_s):
                return await self._http.request("GET", path)
        except NoAnswerError as error:
            raise EngineError(f"engine {self._name} at {self._url} does not answer: {error}") from error
        except TimeoutError as error:
            limit = f"engine {self._name} at {self._url} does not answer within {self._config.control_s:g} s"
            raise EngineError(limit) from error

    async def read(self, path: str) -> dict[str, Any]:
        """The JSON that a path shows. Raises EngineError."""
        return self._checked(path, await self.get(path))

    async def control(self, path: str, body: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """Tell the engine something, once. Raises EngineError."""
        return await self._send(path, body, deadline_s, deadline_s)

    async def repeat(self, path: str, body: Mapping[str, Any], deadline_s: float, shares: int = 3) -> dict[str, Any]:
        """Tell the engine something that does no harm if it comes twice, until it answers.

        Waits for: an answer, for a share of the deadline before it is sent again. Unblocked by: it, a refusal,
        nobody listening, `deadline_s`.

        Raises:
            EngineError: it was refused, or never answered.
        """
        loop = asyncio.get_running_loop()
        ends, pause_s = loop.time() + deadline_s, _FIRST_PAUSE_S
        while True:
            attempt_s = min(deadline_s / shares, ends - loop.time())
            try:
                return await self._send(path, body, attempt_s, deadline_s)
            except (LostAnswerError, EngineRefusedError) as error:
                is_lost = isinstance(error, LostAnswerError) or error.status in GATEWAY_STATUSES
                if not is_lost or loop.time() + pause_s >= ends:
                    raise
            self.repeated[path] += 1
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def close(self) -> None:
        """Close the connections; safe to call twice."""
        await self._http.close()

    async def _send(self, path: str, body: Mapping[str, Any], attempt_s: float, deadline_s: float) -> dict[str, Any]:
        try:
            response = await self.post(path, orjson.dumps(body), attempt_s)
        except TimeoutError:
            raise LostAnswerError(f"engine {self._name}: {path} took longer than {deadline_s:g} s") from None
        except NoAnswerError as error:
            kind = LostAnswerError if error.is_delivered else EngineError
            raise kind(f"engine {self._name} at {self._url}: {path}: {error}") from error
        return self._checked(path, response)

    def _checked(self, path: str, response: Answer) -> dict[str, Any]:
        if response.status != HTTPStatus.OK:
            raise EngineRefusedError(f"engine {self._name}: {path}: {error_text(response)}", response.status)
        answer = {} if response.body in _NOTHING else decoded(response)
        if not isinstance(answer, dict):
            raise EngineError(f"engine {self._name}: {path}: no JSON object but {response.text[:300]}")
        return answer


def generation_failure(engine: str, response: Answer) -> EpisodeError:
    """What an answer with an error status means for its generation request."""
    text = error_text(response)
    if (seconds := retry_after_s(response)) is not None:
        return EngineBusyError(f"{engine}: {text}; wants to be asked again after {seconds:g} s", seconds)
    # Of a call that came twice one copy has no answer but this; under another id the request has one.
    is_copy = response.status == HTTPStatus.BAD_REQUEST and _DUPLICATE in text.lower()
    kind = "unreachable" if is_copy or response.status in GATEWAY_STATUSES else "refused"
    return EpisodeError(Boundary.ENGINE, kind, f"{engine}: {text}")


def retry_after_s(response: Answer) -> float | None:
    """Seconds after which an engine under load wants to be asked again; None if it does not say that it is.

    A time of day is understood as well, and what is longer than `LONGEST_RETRY_AFTER_S` is shortened to it.

    Example: HTTP 503 with ``Retry-After: 2`` gives 2.0, HTTP 503 without the header gives None.
    """
    text = response.headers.get("retry-after")
    if response.status == HTTPStatus.TOO_MANY_REQUESTS:
        text = text or str(_DEFAULT_RETRY_AFTER_S)
    elif response.status != HTTPStatus.SERVICE_UNAVAILABLE:
        return None
    if text is None:
        return None
    return min(max(_seconds(text), 0.0), LONGEST_RETRY_AFTER_S)


def _seconds(text: str) -> float:
    try:
        return float(int(text)) if text.isdigit() else float(_until(text))
    except ValueError:
        return _DEFAULT_RETRY_AFTER_S


def _until(text: str) -> float:
    """Seconds until a date of HTTP. Raises ValueError if it is none."""
    when = parsedate_to_datetime(text)
    return (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
