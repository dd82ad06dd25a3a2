"""Every token of some probability can be drawn, none of probability 0 is, however close to 1 the random number is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.request import DrawParams
from agentrl.engine.sampler import Draw, draw, invert

LAST = 1 - 2.0**-53  # the largest number that a draw can meet
PLAIN: dict[str, Any] = {}
CUT: dict[str, Any] = {"top_k": 4096}


def drawn_with(logits_NV: torch.Tensor, numbers: np.ndarray, monkeypatch, **values: Any) -> Draw:
    monkeypatch.setattr("agentrl.engine.sampler.uniforms", lambda seeds, positions: numbers)
    params = [DrawParams.parse(values, frozenset(), default_seed=0)] * len(logits_NV)
    return draw(logits_NV, params, np.zeros(len(logits_NV), np.int64), rounds=False)


@pytest.mark.parametrize("values", [PLAIN, CUT, {"top_p": 0.9999999}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", [0.0, 2.0**-53, 1 - 2.0**-24, LAST])
def test_no_number_draws_a_token_of_probability_0(number, dtype, values, monkeypatch):
    logits = torch.full((3, 64), -math.inf, dtype=dtype)
    logits[0, 10:30] = torch.linspace(-3, 2, 20)
    logits[1, 63] = 0.0
    logits[2, [0, 5]] = torch.tensor([0.0, -90.0], dtype=dtype)
    drawn = drawn_with(logits, np.full(3, number), monkeypatch, **values)
    assert all(math.isfinite(logprob) for logprob in drawn.logprobs)
    for row, token in enumerate(drawn.tokens):
        assert logits[row, token] > -math.inf
        if (kept := drawn.kept_logprobs[row]) is not None:
            assert math.isfinite(kept)
            assert token in drawn.kept_ids[row]


@pytest.mark.parametrize("values", [PLAIN, {"top_p": 1 - 1e-12}])
def test_every_token_of_a_vocabulary_of_150000_can_be_drawn(values, monkeypatch):
    # Falling probabilities, the last of them 8e-11: in float32 each of these is lost in the sum.
    logprobs = np.linspace(0, -14, 150_000)
    logprobs -= np.log(np.exp(logprobs).sum())
    probs = np.exp(logprobs)
    wanted = np.arange(0, 150_000, 7919)
    numbers = (np.cumsum(probs) - probs / 2)[wanted]
    logits = torch.from_numpy(logprobs)[None]
    drawn = [drawn_with(logits, number[None], monkeypatch, **values).tokens[0] for number in numbers]
    assert drawn == wanted.tolist()
    single = [drawn_with(logits.float(), number[None], monkeypatch, **values).tokens[0] for number in numbers]
    # Logits rounded to float32 move the sums, by more than the last tokens' probabilities.
    assert np.abs(single - wanted).max() < 20
    assert len(set(single)) == len(wanted)


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 1e-9, 0.3, 1.0, 7.0]), min_size=1, max_size=40).filter(any),
    number=st.one_of(st.sampled_from([0.0, LAST, 0.5, 1 - 2.0**-24]), st.floats(0, LAST)),
    single=st.booleans(),
)
def test_the_drawn_token_is_the_first_whose_cumulative_sum_exceeds_the_number(weights, number, single):
    probs = torch.tensor([weights], dtype=torch.float32 if single else torch.float64)
    token = int(invert(probs, torch.tensor([number], dtype=torch.float64)))
    assert probs[0, token] > 0
    values = probs[0].double().tolist()
    target = number * math.fsum(values)
    assert math.fsum(values[:token]) <= target * (1 + 1e-12)
    assert math.fsum(values[: token + 1]) >= target * (1 - 1e-12)
