"""The ``/generate`` route: bodies to requests, requests to SGLang's answers, whole or streamed."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import orjson

from agentrl.engine.adapters import AdapterService
from agentrl.engine.request import MAX_TOP_K, BadRequestError, DrawParams, Request
from agentrl.engine.scheduler import Scheduler
from agentrl.inference.identity import request_hash


class GenerationService:
    """Turns bodies of ``/generate`` into scheduled requests and answers when they end."""

    def __init__(
        self, scheduler: Scheduler, adapters: AdapterService, eos_token_ids: frozenset[int], vocab_size: int
    ) -> None:
        self._scheduler = scheduler
        self._adapters = adapters
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._withdrawals: set[asyncio.Task[None]] = set()

    async def generate(self, body: dict[str, Any], hangup: asyncio.Future[None]) -> Any:
        """One answer, or a list of them for a batch.

        Waits for: all requests of the body. Unblocked by: their end, by whatever cause; `hangup`, which
        is done when the client is gone, aborts them.

        Raises:
            BadRequestError: the body does not fit; nothing was scheduled.
        """
        try:
            requests, is_batch = self._parse(body)
            await self._submit(requests, hangup)
            for request in requests:
                await request.done.wait()
        finally:
            hangup.cancel()
        answers = [_answer(request) for request in requests]
        return answers if is_batch else answers[0]

    async def stream(self, body: dict[str, Any], hangup: asyncio.Future[None]) -> AsyncIterator[bytes]:
        """Server-sent events, each with all output so far; ends with ``[DONE]``.

        Waits for: the next token. Unblocked by: it, or the request's end; `hangup` aborts it.
        """
        try:
            requests, is_batch = self._parse(body)
            if is_batch:
                raise BadRequestError("a batch cannot be streamed; send its prompts one by one")
            request = requests[0]
            changed = asyncio.Event()
            request.on_change = changed.set
            await self._submit(requests, hangup)
        except BadRequestError as error:
            hangup.cancel()
            yield _event({"error": {"message": str(error)}})
            return
        try:
            is_over = False
            while not is_over:
                await changed.wait()
                changed.clear()
                # A slow reader may hold up the event below until the request has ended; the end is one more event.
                is_over = request.finish_reason is not None
                yield _event(_answer(request))
        finally:
            hangup.cancel()
        yield b"data: [DONE]\n\n"

    async def _submit(self, requests: list[Request], hangup: asyncio.Future[None]) -> None:
        for number, request in enumerate(requests):
            try:
                self._scheduler.submit(request)
            except BadRequestError:
                await self._withdraw(requests[:number])
                raise
        hangup.add_done_callback(lambda _: self._withdraw_later(requests))

    def _withdraw_later(self, requests: list[Request]) -> None:
        if all(request.finish_reason is not None for request in requests):
            return
        task = asyncio.create_task(self._withdraw(requests), name="withdraw")
        self._withdrawals.add(task)
        task.add_done_callback(self._withdrawals.discard)

    async def _withdraw(self, requests: list[Request]) -> None:
        """Abort requests that nobody waits for. Waits for: the step under way. Unblocked by: its end."""
        async with self._scheduler.between_steps():
            for request in requests:
                if request.finish_reason is None:
                    self._scheduler.abort(request.rid)

    def _parse(self, body: dict[str, Any]) -> tuple[list[Request], bool]:
        prompts = body.get("input_ids")
        if not isinstance(prompts, list) or not prompts:
            raise BadRequestError("input_ids must be a list of token ids, or a list of such lists")
        is_batch = isinstance(prompts[0], list)
        prompts = prompts if is_batch else [prompts]
        rids = body.get("rid") or [secrets.token_hex(16) for _ in prompts]
        rids = rids if isinstance(rids, list) else [rids]
        sampling = body.get("sampling_params") or {}
        samplings = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        if len(rids) != len(prompts) or len(samplings) != len(prompts):
            raise BadRequestError(f"{len(prompts)} prompts, but {len(rids)} rid and {len(samplings)} sampling_params")
        loras = body.get("lora_path")
        loras = loras if isinstance(loras, list) else [loras] * len(prompts)
        if len(loras) != len(prompts):
            raise BadRequestError(f"{len(prompts)} prompts, but {len(loras)} lora_path")
        entries = zip(rids, prompts, samplings, loras, strict=True)
        return [self._parse_one(body, *entry) for entry in entries], is_batch

    def _parse_one(self, body: dict[str, Any], rid: Any, prompt: Any, values: Any, lora: Any) -> Request:
        if not isinstance(rid, str) or not isinstance(values, dict) or not isinstance(prompt, list) or not prompt:
            raise BadRequestError("each prompt needs token ids, a string as rid and an object as sampling_params")
        self._check_ids(prompt)
        params = DrawParams.parse(values, self._eos_token_ids, secrets.randbits(62))
        wants_mask = bool(body.get("return_sampling_mask"))
        if wants_mask and params.temperature > 0 and not 1 < params.top_k <= MAX_TOP_K:
            raise BadRequestError(f"return_sampling_mask needs a finite 1 < top_k <= {MAX_TOP_K}, or temperature 0")
        start = body.get("logprob_start_len")
        if start is not None and (type(start) is not int or start < -1):
            raise BadRequestError(f"logprob_start_len must be a position or -1, got {start!r}")
        score_from = start if start is not None and start >= 0 and body.get("return_logprob") else None
        if params.max_new_tokens == 0 and score_from is None:
            raise BadRequestError("max_new_tokens 0 needs return_logprob and logprob_start_len: there is nothing to do")
        routed_from = _routed_from(body, len(prompt)) if body.get("return_routed_experts") else None
        adapter = self._adapters.serial_of(lora)
        digest = request_hash(prompt, values, lora)
        return Request(rid, prompt, params, wants_mask, score_from, routed_from, adapter, digest)

    def _check_ids(self, prompt: list[Any]) -> None:
        try:
            ids = np.asarray(prompt)
        except ValueError:
            raise BadRequestError("input_ids must be flat lists of integers") from None
        if ids.dtype.kind != "i" or ids.ndim != 1:
            raise BadRequestError("input_ids must be flat lists of integers")
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(outside):
            raise BadRequestError(f"input id {outside[0]} lies outside the vocabulary of {self._vocab_size}")


def _answer(request: Request) -> dict[str, Any]:
    """The request's state in SGLang's form; version spans come with the end."""
    meta: dict[str, Any] = {
        "id": request.rid,
        "request_hash": request.digest,
        "finish_reason": request.finish_reason,
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": len(request.output_ids),
        "cached_tokens": request.cached_tokens,
        "num_retractions": request.retractions,
        "input_token_logprobs": _prompt_logprobs(request),
        "output_token_logprobs": [[lp, t, None] for lp, t in zip(request.logprobs, request.output_ids, strict=True)],
        "output_token_logprobs_length": len(request.logprobs),
        "e2e_latency": time.monotonic() - request.arrived,
    }
    if request.wants_mask:
        meta["output_token_sampling_mask"] = request.kept_ids
        meta["output_token_sampling_logprobs"] = request.kept_logprobs
        meta["output_token_sampling_mask_length"] = len(request.kept_ids)
    if request.finish_reason is not None:
        if request.routing is not None:
            meta["routed_experts"] = base64.b64encode(request.routing[request.routed_from :].tobytes()).decode()
        meta["weight_versions"] = _spans(request.spans)
        meta["kv_versions"] = _spans(request.kv_spans)
        meta["weight_version"] = request.spans[-1][0] if request.spans else None
    return {"output_ids": request.output_ids, "meta_info": meta}


def _routed_from(body: dict[str, Any], num_prompt: int) -> int:
    start = body.get("routed_experts_start_len") or 0
    if type(start) is not int or not 0 <= start <= num_prompt:
        raise BadRequestError(f"routed_experts_start_len must lie in the prompt of {num_prompt} tokens, got {start!r}")
    return start


def _prompt_logprobs(request: Request) -> list[list[Any]]:
    if request.score_from is None:
        return []
    scored = zip(request.prompt_logprobs, request.prompt_ids, strict=False)
    return [[logprob, token, None] for logprob, token in scored][request.score_from :]


def _spans(spans: list[list[Any]]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in spans]


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
