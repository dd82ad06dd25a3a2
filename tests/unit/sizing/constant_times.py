"""Runs whose parts take the same time again and again, so that a hand can work them out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentrl.sizing.config import rough_latencies
from agentrl.sizing.latencies import DecodeCurve, EpisodeShape, Latencies, Measured, Shapes

FREE = (
    "engine_slots", "request_s", "prefill_token_s", "environment_start_s", "environment_score_s", "trainer_fixed_s",
    "trainer_token_s", "stage_s", "publish_s", "pause_s", "interrupt_s",
)  # fmt: skip


def given(value: float) -> Measured:
    return Measured(value, "", "by hand")


def constant(
    decode: tuple[tuple[float, float], ...] = ((1, 10), (2, 20)),
    turns: int = 1,
    tokens: float = 10,
    step_s: float = 0.0,
    prompt_tokens: float = 0.0,
    **figures: Any,
) -> Latencies:
    """Episodes of equal turns; what is not named takes no time, and an engine has slots without end."""
    nothing = {name: given(0.0) for name in FREE} | {"engine_slots": given(1e9)}
    steps = (*(step_s,) * (turns - 1), 0.0)
    shape = EpisodeShape((prompt_tokens,) * turns, (tokens,) * turns, steps)
    named = {name: given(value) if isinstance(value, int | float) else value for name, value in figures.items()}
    return replace(
        rough_latencies(),
        decode=DecodeCurve(tuple((float(number), float(rate)) for number, rate in decode), "by hand"),
        shapes=Shapes((shape,), "by hand"),
        **{**nothing, **named},
    )
