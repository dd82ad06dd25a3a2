"""Token ids in, token ids out: ``POST /inference/v1/generate``, as vLLM has it and verifiers' TrainClient calls it.

The program renders its conversation and parses the reply itself. No SDK has types for this route.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter

from agentrl.gateway import rendering, shapes
from agentrl.gateway.dialects import ReadCall
from agentrl.types.generation import FinishReason
from agentrl.types.message import Message
from agentrl.types.program import ModelCall, ModelReply

_MOST_TOKEN = 2**31 - 1
_IN_VAIN: dict[str, tuple[object, ...]] = {
    "temperature": (),
    "top_p": (),
    "top_k": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "seed": (),
    "stop": ([],),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
}
_READ = ("n", "max_tokens", "logprobs", "prompt_logprobs")
# A reply has no text of its own, and always the ids of its special tokens.
_SILENT = ("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "routed_experts_prompt_start")
_BODY = frozenset({"model", "token_ids", "sampling_params", "stream", "features", "content_parts"}) | frozenset(
    {"cache_salt", "priority", "request_id", "return_token_ids", "stream_options"}
)
_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class _Sampling(BaseModel):
    n: int | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class _Request(BaseModel):
    model: str
    token_ids: list[int] = Field(min_length=1)
    sampling_params: _Sampling | None = None


_SHAPE: shapes.Shape = TypeAdapter(_Request)


class TokenIdsDialect(rendering.OpenAIStyle):
    """Reads and answers calls in token ids."""

    name = "token_ids"
    path = "/inference/v1/generate"
    over_status = 403

    def read(self, body: bytes) -> ReadCall:
        """The call that a request's body asks for. Raises CallRefusedError."""
        request = shapes.read_object(body)
        shapes.check(_SHAPE, request)
        sampling: dict[str, Any] = request.get("sampling_params") or {}
        _refuse_what_no_policy_gives(request, sampling)
        ids = request["token_ids"]
        if min(ids) < 0 or max(ids) > _MOST_TOKEN:
            raise shapes.refused("an id is negative or greater than any vocabulary", "token_ids")
        call = ModelCall(
            model=request["model"],
            max_tokens=shapes.token_bound(sampling, "max_tokens"),
            prompt_ids=np.asarray(ids, np.int32),
        )
        overrides = shapes.in_vain(sampling, _IN_VAIN, (*_READ, *_SILENT))
        overrides += shapes.in_vain(request, {}, _BODY)
        return ReadCall(call, is_streamed=False, overrides=tuple(dict.fromkeys(overrides)))

    def answer(self, read: ReadCall, reply: ModelReply, call_id: str) -> dict[str, Any]:
        """The ids of the reply, each with its log-probability.

        Raises:
            ValueError: one is not finite, which the program would take for an answer without evidence.
        """
        ids, logprobs = reply.token_ids.tolist(), reply.logprobs.tolist()
        if not all(map(math.isfinite, logprobs)):
            raise ValueError(f"call {call_id}: a token was drawn whose log-probability is not finite")
        content = [{"token": f"token_id:{i}", "logprob": logprob} for i, logprob in zip(ids, logprobs, strict=True)]
        choice = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": _FINISH[reply.finish],
            "logprobs": {"content": content},
        }
        usage = {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": len(ids),
            "total_tokens": reply.prompt_tokens + len(ids),
            "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        }
        return {"request_id": call_id, "choices": [choice], "usage": usage}

    def events(self, read: ReadCall, reply: ModelReply, call_id: str) -> Iterator[str]:
        """The answer in one piece; `read` lets no call ask for a stream."""
        yield rendering.server_event(self.answer(read, reply, call_id))

    def echo(self, message: Message) -> Message:
        """The message itself: this dialect has no messages that could change."""
        return message


def _refuse_what_no_policy_gives(request: dict[str, Any], sampling: dict[str, Any]) -> None:
    if shapes.flag(request, "stream"):
        raise shapes.refused("this route answers whole", "stream")
    for name in ("features", "content_parts"):
        if request.get(name):
            raise shapes.refused("the policy reads token ids alone", name)
    if sampling.get("n") not in (None, 1):
        raise shapes.refused("the policy gives one choice; leave n out and call again for more", "sampling_params.n")
    if (sampling.get("logprobs") or 0) > 1 or sampling.get("prompt_logprobs") is not None:
        message = "log-probabilities are given of the tokens drawn alone, not of others"
        raise shapes.refused(message, "sampling_params.logprobs")
