from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.engine.request import BadRequestError, DrawParams
from agentrl.engine.sampler import draw, uniforms

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, -math.inf])


def _params(**values: Any) -> DrawParams:
    return DrawParams.parse(values, frozenset({1}), default_seed=0)


def _draw_many(params: DrawParams, count: int) -> Any:
    return draw(LOGITS.repeat(count, 1), [params] * count, np.arange(count), rounds=False)


def test_numbers_depend_on_seed_and_position_alone_and_fill_the_unit_interval() -> None:
    positions = np.arange(4000)
    numbers = uniforms(np.full(4000, 7), positions)
    assert numbers[123] == uniforms(np.asarray([7]), np.asarray([123]))[0]
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    assert np.histogram(numbers, 10, (0, 1))[0] == pytest.approx(np.full(10, 400), abs=80)
    assert abs(np.corrcoef(numbers, uniforms(np.full(4000, 8), positions))[0, 1]) < 0.06
    assert len(set(uniforms(np.asarray([-1, 0, 2**63 - 1, -(2**63)]), np.zeros(4)))) == 4


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    drawn = _draw_many(_params(temperature=0.5), 5000)
    expected = (LOGITS / 0.5).softmax(-1)
    counts = np.bincount(drawn.tokens, minlength=6) / 5000
    assert counts == pytest.approx(expected.numpy(), abs=0.03)
    assert counts[5] == 0, "a token of probability 0 was drawn"
    assert drawn.logprobs[0] == pytest.approx(float(expected.log()[drawn.tokens[0]]), abs=1e-6)


def test_top_k_keeps_the_likeliest_and_renormalises() -> None:
    drawn = _draw_many(_params(top_k=2), 50)
    assert set(drawn.tokens) == {0, 1}
    assert drawn.kept_ids[0] == [0, 1]
    for token, logprob in zip(drawn.tokens, drawn.kept_logprobs, strict=True):
        assert logprob == pytest.approx(math.log((math.e if token == 0 else 1.0) / (math.e + 1.0)), abs=1e-6)


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, [0]), (0.7, [0, 1]), (0.9, [0, 1, 2]), (1.0, [0, 1, 2, 3])])
def test_top_p_keeps_the_fewest_whose_mass_reaches_it(top_p: float, kept: list[int]) -> None:
    assert _draw_many(_params(top_k=4, top_p=top_p), 1).kept_ids == [kept]


def test_top_k_beyond_the_vocabulary_keeps_all_of_it() -> None:
    assert _draw_many(_params(top_k=4096), 1).kept_ids == [[0, 1, 2, 3, 4, 5]]


def test_temperature_0_takes_the_likeliest_and_keeps_it_alone() -> None:
    drawn = _draw_many(_params(temperature=0, top_k=3), 20)
    assert set(drawn.tokens) == {0}
    assert drawn.kept_ids[0] == [0]
    assert drawn.kept_logprobs[0] == 0.0
    assert drawn.logprobs[0] == pytest.approx(float(LOGITS.log_softmax(-1)[0]), abs=1e-6)


def test_a_row_draws_alike_alone_and_among_others() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    params = [_params(sampling_seed=n, temperature=0.5 + n / 8, top_k=n * 3) for n in range(8)]
    positions = np.arange(8) * 11
    together = draw(logits, params, positions, rounds=True)
    for row in range(8):
        alone = draw(logits[row : row + 1], params[row : row + 1], positions[row : row + 1], rounds=True)
        assert (alone.tokens[0], alone.logprobs[0]) == (together.tokens[row], together.logprobs[row])
        assert alone.kept_logprobs[0] == together.kept_logprobs[row]


def test_rounded_logprobs_lie_on_a_grid() -> None:
    drawn = draw(LOGITS[None].double(), [_params()], np.asarray([3]), rounds=True)
    assert (drawn.logprobs[0] * 2**20).is_integer()


def test_stop_tokens_join_the_models_end_token_unless_it_is_ignored() -> None:
    assert _params(stop_token_ids=[7, 8]).stop_token_ids == {1, 7, 8}
    assert _params(stop_token_ids=[7], ignore_eos=True).stop_token_ids == {7}


def test_top_k_minus_1_and_0_mean_no_limit() -> None:
    assert not _params(top_k=-1).truncates
    assert not _params(top_k=0, top_p=1.0).truncates
    assert _params(top_p=0.9).truncates


@pytest.mark.parametrize("value", [math.inf, math.nan, "1", [1], False])
def test_a_value_that_is_no_finite_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(BadRequestError, match=r"sampling_params\.top_p"):
        _params(top_p=value)
