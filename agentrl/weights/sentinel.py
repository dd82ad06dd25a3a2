"""What an engine says of the canary, and the token that it draws behind it, held against the trainer."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence

import numpy as np

from agentrl.protocols import Engine
from agentrl.types.batch import Canary, WeightsManifest
from agentrl.types.errors import EngineBusyError, EngineError, EpisodeError
from agentrl.types.generation import Generation, GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion
from agentrl.weights.receipts import ReceiptError

SENTINEL_SESSION = "sentinel"
_TRIES = 3
_PAUSE_S = 0.1
_RETRIED = ("unreachable", "busy", "engine.identity")


async def check_canary(engine: Engine, manifest: WeightsManifest, max_gap_nats: float) -> tuple[int, float] | None:
    """Let an engine score the canary and draw a token behind it, and compare with what the trainer had computed.

    Scores come by a path of their own through an engine; the token comes as rollouts do. The engine must not be
    paused: both are asked for at once, and neither keeps requests of sessions waiting. Of greedy tokens servers
    report the log-probability at temperature 1.

    Returns:
        The token and its log-probability; None if the canary does not say what may follow.

    Raises:
        ReceiptError: they differ.
        EngineError: it could not be scored, or nothing was drawn.
    """
    canary = manifest.canary
    if canary is None:
        return None
    if not canary.next_ids:
        _check_scores(await engine.score(canary.token_ids), canary, max_gap_nats)
        return None
    try:
        async with asyncio.TaskGroup() as answers:
            scoring = answers.create_task(engine.score(canary.token_ids), name="score-canary")
            drawing = answers.create_task(_draw(engine, canary, manifest.version), name="draw-sentinel")
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    _check_scores(scoring.result(), canary, max_gap_nats)
    return _check_sentinel(drawing.result(), canary, manifest.version, max_gap_nats)


async def _draw(engine: Engine, canary: Canary, version: PolicyVersion) -> Generation:
    """One token behind the canary, greedily.

    Waits for: the engine. Unblocked by: its answer, or the deadline of a generation; what was dropped, aborted or
    answered wrongly is asked for three times. Raises EngineError.
    """
    ids = np.asarray(canary.token_ids, np.int32)
    reason = "it was aborted"
    for _ in range(_TRIES):
        rid, pause_s = secrets.token_hex(16), _PAUSE_S
        request = GenerationRequest(rid, SENTINEL_SESSION, ids, 1, (), Sampling(temperature=0.0), 0, version)
        try:
            generation = await engine.generate(request)
            if len(generation.token_ids):
                return generation
        except EpisodeError as error:
            reason = error.failure.message
            if error.failure.kind not in _RETRIED:
                break
            if isinstance(error, EngineBusyError):
                pause_s = error.retry_after_s
        await asyncio.sleep(pause_s)
    raise EngineError(f"engine {engine.name} drew no token behind the canary: {reason}")


def _check_scores(scores: Sequence[float], canary: Canary, max_gap_nats: float) -> None:
    """Raises ReceiptError if scores of the canary are not the trainer's."""
    expected = canary.logprobs
    if len(scores) != len(expected):
        raise ReceiptError(f"scored {len(scores)} tokens of a canary of {len(expected)}")
    gap = max((abs(score - wanted) for score, wanted in zip(scores, expected, strict=True)), key=_nan_first)
    if not gap <= max_gap_nats:
        raise ReceiptError(
            f"the canary's log-probabilities differ by {gap:.2e} nats from the trainer's "
            f"(bound publish.max_canary_gap_nats = {max_gap_nats:g})"
        )


def _check_sentinel(
    drawn: Generation, canary: Canary, version: PolicyVersion, max_gap_nats: float
) -> tuple[int, float]:
    """The drawn token and its log-probability.

    Where no log-probability of the engine is further than the bound g from the trainer's, that of the token which it
    finds likeliest is at least the trainer's highest less g, and within g of the trainer's for that token; a token
    that the trainer does not list has at most the lowest of the list plus g.

    Raises:
        ReceiptError: it is not of this version, or not what the trainer's weights make likeliest.
    """
    versions = {span.version for span in drawn.versions}
    if versions != {version}:
        raise ReceiptError(f"drew a token behind the canary under version {', '.join(map(str, versions))}")
    token, logprob = int(drawn.token_ids[0]), float(drawn.logprobs[0])
    known = dict(zip(canary.next_ids, canary.next_logprobs, strict=True))
    lowest = canary.next_logprobs[0] - max_gap_nats
    highest = known.get(token, canary.next_logprobs[-1]) + max_gap_nats
    if not lowest <= logprob <= highest:
        expected = f"{known[token]:.4f}" if token in known else f"less than {canary.next_logprobs[-1]:.4f}"
        raise ReceiptError(
            f"drew token {token} behind the canary and gave it {logprob:.4f} nats, where the trainer gives it "
            f"{expected} and token {canary.next_ids[0]} the most, {canary.next_logprobs[0]:.4f} "
            f"(bound publish.max_canary_gap_nats = {max_gap_nats:g})"
        )
    return token, logprob


def _nan_first(gap: float) -> tuple[bool, float]:
    return math.isnan(gap), gap
