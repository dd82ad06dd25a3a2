from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from canned_server import HANGS_UP, canned_server, json_answer, plain_answer

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig
from agentrl.inference.identity import mismatch, request_hash
from agentrl.types.errors import EngineError

SAMPLING = {"temperature": 1.0, "max_new_tokens": 8, "stop_token_ids": [1, 2], "sampling_seed": 7}
BODY = {"rid": "a" * 32, "input_ids": np.asarray([5, 6, 7], np.int32), "sampling_params": SAMPLING}


def test_both_sides_of_the_wire_have_one_hash_of_a_request() -> None:
    turned = {"sampling_seed": 7.0, "stop_token_ids": [1, 2], "max_new_tokens": 8, "temperature": 1}
    assert request_hash([5, 6, 7], turned, None) == request_hash(BODY["input_ids"], SAMPLING, None)


@pytest.mark.parametrize(
    ("ids", "sampling", "adapter"),
    [
        ([5, 6, 8], SAMPLING, None),
        ([5, 6], SAMPLING, None),
        ([5, 6, 7], SAMPLING | {"temperature": 0.9}, None),
        ([5, 6, 7], SAMPLING | {"stop_token_ids": [1]}, None),
        ([5, 6, 7], SAMPLING | {"top_k": 5}, None),
        ([5, 6, 7], SAMPLING, "adapter-0.3"),
    ],
)
def test_whatever_decides_the_tokens_changes_the_hash(ids: list[int], sampling: dict, adapter: str | None) -> None:
    assert request_hash(ids, sampling, adapter) != request_hash([5, 6, 7], SAMPLING, None)


@pytest.mark.parametrize(
    "meta",
    [
        {"id": BODY["rid"], "prompt_tokens": 3, "request_hash": request_hash([5, 6, 7], SAMPLING, None)},
        {"id": BODY["rid"], "prompt_tokens": 3},
        {"id": BODY["rid"], "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}},
    ],
)
def test_an_answer_is_for_its_request_if_nothing_that_it_says_speaks_against_it(meta: dict[str, Any]) -> None:
    assert mismatch({"meta_info": meta}, BODY) is None


def _scored(server: Any, ids: list[int], rid: str | None = None) -> bytes:
    entries = [[None, ids[0], None], *([-0.5, token, None] for token in ids[1:])]
    return json_answer({"meta_info": {"id": rid or server.seen[-1][1]["rid"], "input_token_logprobs": entries}})


class ScoringServer(dict[str, Any]):
    """Answers of a server that scores `answers` one after the other: other tokens, another id, or bytes as they are."""

    def __init__(self, *answers: Any) -> None:
        self._left = list(answers)
        self.server: Any = None

    def get(self, path: str, default: bytes) -> bytes:  # type: ignore[override]
        answer = self._left.pop(0)
        return answer if isinstance(answer, bytes) else _scored(self.server, *answer)


async def _score(*answers: Any) -> list[float]:
    script = ScoringServer(*answers)
    async with canned_server(script) as server:
        script.server = server
        client = EngineClient("main-0", server.url, ClientConfig())
        try:
            return await client.score([5, 6, 7])
        finally:
            await client.close()


@pytest.mark.parametrize("first", [([5, 6, 7], "other"), HANGS_UP, plain_answer(b"", 503), plain_answer(b"", 429)])
async def test_a_score_that_got_lost_is_asked_for_again(first: Any) -> None:
    assert await _score(first, ([5, 6, 7],)) == [-0.5, -0.5]


async def test_scores_of_other_tokens_are_no_scores() -> None:
    with pytest.raises(EngineError, match="3 tokens were sent, 3 scored, token 7 at position 2 is 8"):
        await _score(([5, 6, 8],))


@pytest.mark.parametrize("ids", [[5, 6], [5, 6, 7, 0], [5, 0, 7], [0, 6, 7]])
async def test_scores_of_fewer_or_more_tokens_or_of_0_in_place_of_another_are_no_scores(ids: list[int]) -> None:
    with pytest.raises(EngineError, match="gave no scores of the tokens sent"):
        await _score((ids,))


async def test_the_last_token_of_the_vocabulary_may_be_named_0_as_sglang_does() -> None:
    assert await _score(([5, 6, 0],)) == [-0.5, -0.5]


async def test_a_server_that_always_scores_something_else_is_named() -> None:
    with pytest.raises(EngineError, match="main-0: /generate scored something else: its id is 'other'"):
        await _score(*[([5, 6, 7], "other")] * 3)
