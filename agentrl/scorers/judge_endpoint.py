"""The server of a judge: chat completions by the SDK of OpenAI, and what its refusals mean."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import openai
from openai.types.chat import ChatCompletion

from agentrl.scorers.definition import UNREACHABLE
from agentrl.types.errors import Boundary, EpisodeError, boundary

_OVERLOADED = 529  # of Anthropic, which no standard names
_KINDS: dict[int, str] = {
    _OVERLOADED: "busy",
    HTTPStatus.UNAUTHORIZED: "key",
    HTTPStatus.FORBIDDEN: "key",
    HTTPStatus.NOT_FOUND: "model",
    HTTPStatus.REQUEST_TIMEOUT: "timeout",
    HTTPStatus.TOO_MANY_REQUESTS: "busy",
    HTTPStatus.SERVICE_UNAVAILABLE: "busy",
}


@dataclass(frozen=True, slots=True)
class EndpointAnswer:
    """The text of an answer, and the model as the server names it."""

    text: str
    model: str


class JudgeEndpoint:
    """Asks one server for chat completions, each once: whether to ask again is for whoever asks."""

    def __init__(self, url: str, model: str, key: str, timeout_s: float) -> None:
        self._url, self._model, self._timeout_s = url, model, timeout_s
        self._client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=timeout_s)

    async def ask(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> EndpointAnswer:
        """The answer to a conversation; `options` are further fields of the request.

        Waits for: the server. Unblocked by: its answer, or the deadline.

        Raises:
            EpisodeError: boundary scorer; kind unreachable, connection, timeout, busy, key, model, refused, server,
                answer or cut.
        """
        where = f"{self._model} at {self._url}"
        try:
            # The SDK's own limit is for each read, which a server that sends a byte now and then never exceeds.
            async with asyncio.timeout(self._timeout_s):
                answer: object = await self._client.chat.completions.create(
                    model=self._model,
                    messages=list(messages),  # type: ignore[arg-type]  # plain dicts of role and content
                    extra_body=dict(options),
                )
        except (TimeoutError, openai.APITimeoutError) as error:
            raise _failed("timeout", f"no answer of {where} within {self._timeout_s:g} s") from error
        except openai.APIConnectionError as error:
            # By its name: the SDK has had two libraries below it that raise it.
            is_unsent = type(error.__cause__).__name__ == "ConnectError"
            kind = UNREACHABLE if is_unsent else "connection"
            raise _failed(kind, f"{where} does not answer: {error.__cause__ or error}") from error
        except openai.APIStatusError as error:
            kind = _KINDS.get(error.status_code, "server" if error.status_code >= 500 else "refused")
            raise _failed(kind, f"{where}: HTTP {error.status_code}: {_first_line(error.message)}") from error
        except openai.OpenAIError as error:
            raise _failed("answer", f"{where}: {_first_line(str(error))}") from error
        with boundary(Boundary.SCORER, "answer", f"{where} answered no chat completion"):
            return _read(answer, where)

    async def close(self) -> None:
        """Drop the connections; safe to call twice."""
        await self._client.close()


def _read(answer: object, where: str) -> EndpointAnswer:
    """The text of the first choice. What a server sends is not checked by the SDK, which builds it as it comes."""
    if not isinstance(answer, ChatCompletion):
        raise _failed("answer", f"{where} answered no chat completion but {str(answer)[:80]!r}")
    choice = answer.choices[0]
    if choice.finish_reason == "length":
        raise _failed("cut", f"the answer of {where} was cut off at its limit of tokens")
    if not isinstance(choice.message.content, str) or not isinstance(answer.model, str):
        said = choice.message.refusal or "no text"
        raise _failed("answer", f"{where} answered {_first_line(str(said))}")
    return EndpointAnswer(choice.message.content, answer.model)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def _failed(kind: str, message: str) -> EpisodeError:
    return EpisodeError(Boundary.SCORER, kind, message)
