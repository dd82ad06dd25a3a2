"""Routed experts on the wire: what is asked for, what comes back, what is refused."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from agentrl.inference.wire import generation_body, parse_generation
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.generation import GenerationRequest, Sampling

SHAPE = (2, 3)


def _request(start: int = 1, routing: tuple[int, int] | None = SHAPE) -> GenerationRequest:
    ids = np.asarray([5, 6, 7], np.int32)
    return GenerationRequest("rid", "session", ids, 2, (1,), Sampling(routing=routing), 7, routed_start=start)


def _encoded(values: Any, dtype: str = "<i4") -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode()


def _answer(**meta: Any) -> dict[str, Any]:
    plain = {
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-0.5, 8, None], [-0.25, 9, None]],
        "weight_version": "0.4",
    }
    return {"output_ids": [8, 9], "meta_info": plain | meta}


def test_a_request_asks_for_experts_from_the_first_position_that_is_not_on_record() -> None:
    body = generation_body(_request(start=2))
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 2)


def test_a_request_that_wants_no_experts_does_not_mention_them() -> None:
    assert not [key for key in generation_body(_request(routing=None)) if "routed" in key]


def test_experts_are_read_as_positions_by_layers_by_choices() -> None:
    # Prompt 3 and reply 2: positions 1, 2 and 3 were forwarded and asked for; position 4 was not forwarded.
    values = np.arange(3 * 2 * 3).reshape(3, 2, 3)
    routed = parse_generation(_answer(routed_experts=_encoded(values)), _request()).routed_experts
    assert routed is not None
    assert (routed.start, routed.end, routed.experts.dtype) == (1, 4, np.uint8)
    assert routed.experts.tolist() == values.tolist()


def test_more_than_256_experts_take_two_bytes() -> None:
    values = np.full((3, 2, 3), 256)
    routed = parse_generation(_answer(routed_experts=_encoded(values)), _request()).routed_experts
    assert routed is not None
    assert (routed.experts.dtype, routed.experts.max()) == (np.uint16, 256)


def test_experts_that_nobody_asked_for_are_left_out() -> None:
    answer = _answer(routed_experts=_encoded(np.zeros(18)))
    assert parse_generation(answer, _request(routing=None)).routed_experts is None


BREACHES: dict[str, tuple[dict[str, Any], str]] = {
    "absent": ({}, r"--enable-return-routed-experts"),
    "null": ({"routed_experts": None}, r"--enable-return-routed-experts"),
    "a position too few": ({"routed_experts": _encoded(np.zeros(12))}, "12 routed experts for 3 positions of 2 layers"),
    "a position too many": ({"routed_experts": _encoded(np.zeros(24))}, "24 routed experts for 3 positions"),
    "half a number": ({"routed_experts": _encoded(np.zeros(35), "i2")}, "ValueError"),
    "a negative expert": ({"routed_experts": _encoded(np.full(18, -1))}, "expert -1 does not exist"),
    "no base64": ({"routed_experts": "%%%"}, "Error"),
    "no text": ({"routed_experts": 7}, "TypeError"),
}


@pytest.mark.parametrize("name", BREACHES)
def test_experts_that_are_missing_or_do_not_align_are_a_breach_of_the_contract(name: str) -> None:
    meta, message = BREACHES[name]
    with pytest.raises(EpisodeError, match=message) as caught:
        parse_generation(_answer(**meta), _request())
    assert caught.value.failure.boundary is Boundary.CONTRACT
