"""The route that verifiers' TrainClient calls, called by the function of renderers that it calls it with."""

from __future__ import annotations

import httpx
import httpx2
import numpy as np
import openai
import pytest
from dialect_programs import Served, read, reply_of
from renderers.base import ParsedResponse
from renderers.client import generate

from agentrl.gateway.token_ids import TokenIdsDialect
from agentrl.types.generation import FinishReason
from agentrl.types.message import Message, Role
from agentrl.types.program import CallRefusedError, ModelReply

REPLY = ModelReply(
    Message(Role.ASSISTANT, "93"),
    FinishReason.STOP,
    3,
    np.asarray([9, 3, 2], np.int32),
    np.asarray([-0.5, -1e-7, 0.0], np.float32),
)
BODY = {"model": "main", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, "logprobs": 1}}


class OneRenderer:
    """As much of a renderer as the client asks of it where the prompt is rendered already."""

    supports_tools = True

    def get_stop_token_ids(self) -> list[int]:
        """The end of a turn."""
        return [2]

    def parse_response(self, token_ids, **_) -> ParsedResponse:
        """Ids as text."""
        return ParsedResponse(content=" ".join(map(str, token_ids)), reasoning_content=None, tool_calls=[])


class OlderClient(openai.AsyncOpenAI):
    """verifiers has an openai below 3, which gives the answer as httpx has it."""

    async def post(self, path, *, cast_to, **options):
        """The body of the answer, in the class that is asked for."""
        answer = await super().post(path, cast_to=httpx2.Response, **options)
        assert cast_to is httpx.Response
        return httpx.Response(answer.status_code, content=answer.content)


async def test_the_client_of_renderers_takes_the_answer():
    served = Served(TokenIdsDialect(), REPLY)
    http = httpx2.AsyncClient(transport=httpx2.MockTransport(served.handle))
    client = OlderClient(api_key="key", base_url="http://gateway/v1", http_client=http, max_retries=0)
    result = await generate(
        client=client,
        renderer=OneRenderer(),
        messages=[],
        model="main",
        prompt_ids=[5, 6, 7],
        sampling_params={"temperature": 0.7, "max_tokens": 8, "routed_experts_prompt_start": 0},
        cache_salt="epoch-1",
        priority=3,
        max_prompt_len=100,
    )
    assert result["completion_ids"] == [9, 3, 2]
    assert result["completion_logprobs"] == REPLY.logprobs.tolist()
    assert (result["request_id"], result["finish_reason"], result["content"]) == ("7", "stop", "9 3 2")
    assert result["usage"]["prompt_tokens"] == 3
    (call,) = served.read
    assert (call.call.prompt_ids.tolist(), call.call.prompt_ids.dtype) == ([5, 6, 7], np.int32)
    assert (call.call.max_tokens, call.call.model, call.call.messages) == (8, "main", ())
    assert call.overrides == ("temperature", "stop_token_ids")


def test_a_reply_that_was_cut_off_says_so():
    dialect = TokenIdsDialect()
    answer = dialect.answer(
        read(dialect, BODY), ModelReply(REPLY.message, FinishReason.LENGTH, 3, *_tokens(REPLY)), "7"
    )
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_logprob_that_is_not_finite_is_never_sent():
    dialect = TokenIdsDialect()
    with pytest.raises(ValueError, match="not finite"):
        dialect.answer(read(dialect, BODY), reply_of(REPLY.message), "7")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"token_ids": []}, "token_ids: List should have at least 1 item"),
        ({"token_ids": [1.5]}, r"token_ids\[0\]: Input should be a valid integer"),
        ({"token_ids": ["1"]}, r"token_ids\[0\]: Input should be a valid integer"),
        ({"token_ids": [-1]}, "token_ids: an id is negative"),
        ({"token_ids": [2**31]}, "token_ids: an id is negative or greater"),
        ({"model": None}, "model: Input should be a valid string"),
        ({"stream": True}, "stream: this route answers whole"),
        ({"features": {"mm_hashes": {}}}, "features: the policy reads token ids alone"),
        ({"sampling_params": {"n": 2}}, r"sampling_params.n: the policy gives one choice"),
        ({"sampling_params": {"logprobs": 5}}, "sampling_params.logprobs: log-probabilities are given"),
        ({"sampling_params": {"prompt_logprobs": 0}}, "log-probabilities are given"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens: Input should be at least 1"),
        ({"sampling_params": 5}, "sampling_params: Input should be"),
    ],
)
def test_what_the_route_refuses(change, says):
    with pytest.raises(CallRefusedError, match=says):
        read(TokenIdsDialect(), BODY | change)


def test_settings_without_effect_are_named_once():
    sampling = {"top_p": 0.9, "min_p": 0, "stop": [], "seed": 0, "newest_setting": 1, "skip_special_tokens": False}
    call = read(TokenIdsDialect(), BODY | {"sampling_params": sampling, "newest_field": 1})
    assert call.overrides == ("top_p", "seed", "unrecognized")


def _tokens(reply: ModelReply) -> tuple[np.ndarray, np.ndarray]:
    return reply.token_ids, reply.logprobs
