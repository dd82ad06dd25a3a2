"""Swaps in place, with the KV kept: every token is recomputed under the weights that its span names.

The measure is a plain Hugging Face forward pass by two sets of weights that share one KV cache, as the server's did.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from engine_server import EngineCalls, Reference, logprobs_of, spans_of
from running_request import MANY_TOKENS

from agentrl.inference.client import EngineClient
from agentrl.types.generation import Generation, GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion, VersionSpan
from agentrl.types.weights import FolderWeights, PauseMode

FIRST = PolicyVersion(0, 0)
GAP_NATS = 1e-3
TELLING_GAP_NATS = 0.02
NUM_TOKENS = 160
NUM_REQUESTS = 9  # some of them wait: six run at once
NUM_SWAPS = 4
NUM_TRIES = 60  # to swap at a moment that a busy machine may miss
PIECE_TOKENS = 64  # of a prompt, in one step of the servers of these tests
LONG_PROMPT = [3 + number * 7 % 300 for number in range(900)]


def _request(rid: str, prompt: Sequence[int], num_tokens: int, expects: PolicyVersion) -> GenerationRequest:
    ids = np.asarray(prompt, np.int32)
    return GenerationRequest(rid, rid, ids, num_tokens, (), Sampling(), 7, expects=expects)


class Swaps:
    """Two sets of weights in turn, set ``step % 2`` as version ``0.step``, in place."""

    def __init__(self, engine: EngineCalls, client: EngineClient) -> None:
        self.models = (engine.server.model, engine.server.other_model)
        self.version = FIRST
        self._client = client

    async def swap(self) -> None:
        self.version = self.version.next()
        await self._client.pause()
        await self._client.swap(FolderWeights(str(self.model_of(self.version))), self.version)
        await self._client.resume()

    def model_of(self, version: PolicyVersion) -> Path:
        return self.models[version.step % 2]


def _parts(swaps: Swaps, num_prompt: int, spans: Sequence[VersionSpan], late: int = 0) -> list[tuple[Path, int]]:
    """Which weights forwarded up to where: the token before a span's first is the first that its weights forward."""
    ends = [num_prompt + span.end - 1 + late for span in spans[:-1]] + [num_prompt + spans[-1].end]
    return [(swaps.model_of(span.version), end) for span, end in zip(spans, ends, strict=True)]


def _gaps(reference: Reference, parts: list[tuple[Path, int]], prompt: list[int], generation: Generation) -> np.ndarray:
    """Differences between reported and recomputed log-probabilities, one per sampled token."""
    output = generation.token_ids.tolist()
    table = reference.switched(parts, prompt + output)[len(prompt) - 1 : -1].numpy()
    return np.abs(table[np.arange(len(output)), output] - generation.logprobs)


async def test_tokens_of_running_and_waiting_requests_name_the_weights_that_drew_them(
    in_place_engine: EngineCalls, reference: Reference
) -> None:
    client = in_place_engine.server.client(PauseMode.IN_PLACE)
    swaps, chance = Swaps(in_place_engine, client), random.Random(5)
    prompts = [[20 + number, 31, 42, 53, 64, 75, 86] for number in range(NUM_REQUESTS)]
    for attempt in range(NUM_TRIES):
        expected = swaps.version
        began = time.monotonic()
        await client.generate(_request(f"as-long-as-a-reply-{attempt:04d}", prompts[0], NUM_TOKENS, expected))
        reply_s = time.monotonic() - began
        playing = [
            asyncio.create_task(client.generate(_request(f"swapped-{attempt:04d}-{n}", prompt, NUM_TOKENS, expected)))
            for n, prompt in enumerate(prompts)
        ]
        for _ in range(NUM_SWAPS):
            await asyncio.sleep(reply_s * chance.uniform(0.05, 0.2))
            await swaps.swap()
        replies = await asyncio.gather(*playing)
        for prompt, reply in zip(prompts, replies, strict=True):
            _check_spans(swaps, reference, prompt, reply, expected)
        if max(len(reply.versions) for reply in replies) > 2:
            break
    else:
        raise AssertionError("no request lived through several swaps")
    await client.close()


def _check_spans(
    swaps: Swaps, reference: Reference, prompt: list[int], reply: Generation, expected: PolicyVersion
) -> None:
    """Each token was drawn by the weights of its span, and not by those of the span of its neighbour."""
    parts = _parts(swaps, len(prompt), reply.versions)
    assert _gaps(reference, parts, prompt, reply).max() < GAP_NATS
    assert {span.version for span in reply.kv_versions} <= {span.version for span in reply.versions} | {expected}
    if len(reply.versions) > 1:
        shifted = _parts(swaps, len(prompt), reply.versions, late=1)
        assert _gaps(reference, shifted, prompt, reply).max() > TELLING_GAP_NATS, "a shift by one must show"


async def test_a_request_whose_prompt_was_half_read_at_the_swap_does_not_claim_fresh_kv(
    in_place_engine: EngineCalls, reference: Reference
) -> None:
    client = in_place_engine.server.client(PauseMode.IN_PLACE)
    swaps, num_mixed = Swaps(in_place_engine, client), 0
    began = time.monotonic()
    await client.generate(_request("as-long-as-a-prompt", [2, *LONG_PROMPT], 1, FIRST))
    delay_s = (time.monotonic() - began) / 2
    for number in range(NUM_TRIES):
        before = swaps.version
        prompt = [3 + number, *LONG_PROMPT]
        playing = asyncio.create_task(client.generate(_request(f"half-read-{number:04d}", prompt, 8, before)))
        await asyncio.sleep(delay_s)
        await swaps.swap()
        reply = await playing
        if reply.versions[0].version == before:
            delay_s *= 0.8  # the prompt was read to its end
            continue
        ends = range(0, len(prompt), PIECE_TOKENS)
        old, new = swaps.model_of(before), swaps.model_of(swaps.version)
        whole = len(prompt) + len(reply.token_ids)
        gaps = {end: _gaps(reference, [(old, end), (new, whole)], prompt, reply).max() for end in ends}
        kept = min(gaps, key=gaps.__getitem__)
        assert gaps[kept] < GAP_NATS, f"no split of the prompt explains the reply: {gaps}"
        if kept == 0:
            delay_s *= 1.25  # nothing of it was read
            continue
        assert reply.kv_versions == (VersionSpan(before, 0, len(reply.token_ids)),)
        num_mixed += 1
        if num_mixed == 3:
            break
    assert num_mixed, "no swap came while a prompt was being read"
    await client.close()


@pytest.mark.parametrize("late", [0, 1])
async def test_a_server_that_schedules_ahead_gives_the_token_in_its_queue_the_label_of_the_next_weights(
    engine: EngineCalls, reference: Reference, late: int
) -> None:
    prompt = [20, 31, 42, 53, 64, 75, 86]
    request = await engine.start_running(prompt, temperature=1.0)
    await engine.ok("/pause_generation", mode="in_place")
    await engine.load(engine.server.other_model, "0.1", flush_cache=False)
    await engine.ok("/continue_generation")
    answer = await request.stop_after(MANY_TOKENS)
    (_, _, switch), _ = spans_of(answer)
    ids = prompt + answer["output_ids"]
    parts = [(engine.server.model, len(prompt) + switch - 1 + late), (engine.server.other_model, len(ids))]
    table = reference.switched(parts, ids)[len(prompt) - 1 : -1].numpy()
    gaps = np.abs(table[np.arange(len(answer["output_ids"])), answer["output_ids"]] - np.asarray(logprobs_of(answer)))
    is_late = engine.server.traits.labels_tokens_in_its_queue_late
    assert (gaps.max() < GAP_NATS) == (is_late == bool(late))
