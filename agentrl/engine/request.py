"""A generation request inside the engine, and the checks that a request body must pass."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

Value = TypeVar("Value")

MAX_TOP_K = 4096
_GREEDY_BELOW = 1e-6
_SEED_LIMIT = 2**63
_SAMPLING_KEYS = {
    "max_new_tokens", "temperature", "top_k", "top_p", "stop_token_ids", "ignore_eos", "sampling_seed", "n",
}  # fmt: skip


class UnwellError(Exception):
    """The engine cannot serve now; becomes HTTP 503 with this message."""


class BadRequestError(Exception):
    """A request that cannot be served as given; becomes HTTP 400 with this message and these further fields."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.fields = fields


def field_of(body: dict[str, Any], key: str, kind: type[Value]) -> Value:
    """What a call must give, of exactly this type. Raises BadRequestError."""
    value: Value | None = body.get(key)
    if type(value) is not kind or value == "":
        raise BadRequestError(f"{key} must be given, as {kind.__name__}, got {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How to draw tokens for one request; `top_k` 0 means no limit, `temperature` 0 means the likeliest."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stop_token_ids: frozenset[int]
    seed: int

    @classmethod
    def parse(cls, values: dict[str, Any], eos_token_ids: frozenset[int], default_seed: int) -> DrawParams:
        """Read SGLang's ``sampling_params``. Raises BadRequestError naming the field."""
        unknown = set(values) - _SAMPLING_KEYS
        if unknown:
            raise BadRequestError(
                f"unknown field {sorted(unknown)} in sampling_params; known: {sorted(_SAMPLING_KEYS)}"
            )
        if values.get("n", 1) != 1:
            raise BadRequestError("n > 1 is not served; send a batch of equal prompts instead")
        stop = values.get("stop_token_ids") or []
        if not isinstance(stop, list) or not all(type(token) is int for token in stop):
            raise BadRequestError("stop_token_ids must be a list of integers")
        params = cls(
            max_new_tokens=_number(values, "max_new_tokens", 128, int),
            temperature=_number(values, "temperature", 1.0, float),
            top_k=max(_number(values, "top_k", -1, int), 0),
            top_p=_number(values, "top_p", 1.0, float),
            stop_token_ids=frozenset(stop) | (frozenset() if values.get("ignore_eos") else eos_token_ids),
            seed=_number(values, "sampling_seed", default_seed, int),
        )
        if params.max_new_tokens < 0 or params.temperature < 0 or not 0 < params.top_p <= 1:
            raise BadRequestError("max_new_tokens and temperature must be at least 0, top_p above 0 and at most 1")
        if not -_SEED_LIMIT <= params.seed < _SEED_LIMIT:
            raise BadRequestError(f"sampling_seed must fit into 64 bits with sign, got {params.seed}")
        return params if params.temperature >= _GREEDY_BELOW else replace(params, temperature=0.0)

    @property
    def truncates(self) -> bool:
        """Whether a draw keeps only part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1.0


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated.

    `spans` and `kv_spans` are ``[label, start, end]`` over the output tokens. `routing` are the experts of
    the context's positions, [positions, layers, top_k], if they are wanted from position `routed_from` on.
    `adapter` is the serial of its LoRA adapter, 0 for the bare weights; `digest` is the hash that its answer
    echoes. The request is over once `finish_reason` is set; `on_change` tells its waiters.
    """

    rid: str
    prompt_ids: list[int]
    params: DrawParams
    wants_mask: bool
    score_from: int | None
    routed_from: int | None = None
    adapter: int = 0
    digest: str = ""
    on_change: Callable[[], None] = lambda: None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_logprobs: list[float] = field(default_factory=list)
    kept_ids: list[list[int]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    kv_spans: list[list[Any]] = field(default_factory=list)
    routing: np.ndarray | None = None
    slot: int | None = None
    cached_tokens: int = 0
    retractions: int = 0
    finish_reason: dict[str, Any] | None = None
    arrived: float = field(default_factory=time.monotonic)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_context(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    def pending(self, num_cached: int) -> list[int]:
        """Context tokens from `num_cached` on."""
        num_prompt = len(self.prompt_ids)
        if num_cached >= num_prompt:
            return self.output_ids[num_cached - num_prompt :]
        return self.prompt_ids[num_cached:] + self.output_ids

    def append(self, token: int, logprob: float, label: str, kv_label: str) -> None:
        """Add one drawn token and extend the version spans."""
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        _extend(self.spans, label, len(self.output_ids))
        _extend(self.kv_spans, kv_label, len(self.output_ids))

    def keep_routing(self, routing: np.ndarray) -> None:
        """Take the experts of the first positions; those known of later ones stay.

        A request that lost its slot and was aborted while it computed its context again has fewer than before.
        """
        if self.routing is not None:
            routing = np.concatenate([routing, self.routing[len(routing) :]])
        self.routing = routing

    def finish(self, reason: dict[str, Any]) -> None:
        """End the request; what it has so far is its answer."""
        self.finish_reason = reason
        self.done.set()
        self.on_change()


def _extend(spans: list[list[Any]], label: str, end: int) -> None:
    if spans and spans[-1][0] == label:
        spans[-1][2] = end
    else:
        spans.append([label, end - 1, end])


def _number(values: dict[str, Any], key: str, default: Any, kind: type) -> Any:
    value = values.get(key)
    if value is None:
        return default
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (kind is int and value != int(value)):
        raise BadRequestError(
            f"sampling_params.{key} must be {'an integer' if kind is int else 'a number'}, got {value!r}"
        )
    return kind(value)
