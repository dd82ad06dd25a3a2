from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from agentrl.inference.wire import generation_body, parse_generation
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.generation import FinishReason, GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion, VersionSpan


def _request(**sampling: Any) -> GenerationRequest:
    return GenerationRequest("rid-1", "session", np.asarray([5, 6], np.int32), 3, (1, 2), Sampling(**sampling), 7)


def _sent(request: GenerationRequest) -> Any:
    return orjson.loads(orjson.dumps(generation_body(request), option=orjson.OPT_SERIALIZE_NUMPY))


def _answer() -> dict[str, Any]:
    return {
        "output_ids": [8, 9, 1],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 1},
            "output_token_logprobs": [[-0.5, 8, None], [-0.25, 9, None], [-0.125, 1, None]],
            "output_token_sampling_logprobs": [-0.4, -0.2, -0.1],
            "output_token_sampling_mask": [[8, 9], [9], [1, 8, 9]],
            "weight_versions": [{"version": "0.3", "start": 0, "end": 1}, {"version": "0.4", "start": 1, "end": 3}],
            "kv_versions": [{"version": "0.3", "start": 0, "end": 3}],
            "weight_version": "0.4",
            "cached_tokens": 2,
        },
    }


def test_a_plain_request_asks_for_no_mask() -> None:
    body = _sent(_request(temperature=0.7))
    assert body == {
        "rid": "rid-1",
        "input_ids": [5, 6],
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": 3, "temperature": 0.7, "stop_token_ids": [1, 2], "sampling_seed": 7,
        },
    }  # fmt: skip


def test_a_truncating_request_asks_for_the_kept_sets() -> None:
    body = _sent(_request(top_k=20, top_p=0.9))
    assert body["return_sampling_mask"] is True
    assert (body["sampling_params"]["top_k"], body["sampling_params"]["top_p"]) == (20, 0.9)


def test_an_answer_becomes_the_replay_contract() -> None:
    generation = parse_generation(_answer(), _request())
    assert generation.token_ids.tolist() == [8, 9, 1]
    assert generation.logprobs.tolist() == [-0.5, -0.25, -0.125]
    assert generation.versions == (VersionSpan(PolicyVersion(0, 3), 0, 1), VersionSpan(PolicyVersion(0, 4), 1, 3))
    assert generation.kv_versions == (VersionSpan(PolicyVersion(0, 3), 0, 3),)
    assert (generation.finish, generation.cached_tokens, generation.kept_tokens) == (FinishReason.STOP, 2, None)


def test_a_truncated_answer_carries_renormalised_logprobs_and_kept_sets() -> None:
    generation = parse_generation(_answer(), _request(top_k=20))
    assert generation.logprobs == pytest.approx([-0.4, -0.2, -0.1])
    assert generation.kept_tokens is not None
    assert generation.kept_tokens.ids.tolist() == [8, 9, 9, 1, 8, 9]
    assert generation.kept_tokens.offsets.tolist() == [0, 2, 3, 6]


@pytest.mark.parametrize(("expects", "step"), [(None, 4), (PolicyVersion(0, 4), 4), (PolicyVersion(0, 2), 2)])
def test_a_server_without_spans_speaks_for_all_tokens_by_the_older_of_two_versions(
    expects: PolicyVersion | None, step: int
) -> None:
    answer = _answer()
    del answer["meta_info"]["weight_versions"], answer["meta_info"]["kv_versions"]
    generation = parse_generation(answer, replace(_request(), expects=expects))
    assert generation.versions == generation.kv_versions == (VersionSpan(PolicyVersion(0, step), 0, 3),)


def _kv_of_what_was_held(cached: int, **meta: Any) -> set[PolicyVersion]:
    """KV versions of a request that expected 0.3, was held over a swap that KV survived, and ran at 0.4."""
    answer = _answer()
    answer["meta_info"] |= {"weight_versions": [{"version": "0.4", "start": 0, "end": 3}], "cached_tokens": cached}
    del answer["meta_info"]["kv_versions"]
    answer["meta_info"] |= meta
    generation = parse_generation(answer, replace(_request(), expects=PolicyVersion(0, 3)), keeps_kv=True)
    assert generation.versions == (VersionSpan(PolicyVersion(0, 4), 0, 3),)
    return {span.version for span in generation.kv_versions}


@pytest.mark.parametrize("cached", [12, 0])
def test_kv_of_a_server_that_reports_none_may_be_as_old_as_the_request_expected(cached: int) -> None:
    assert _kv_of_what_was_held(cached) == {PolicyVersion(0, 3)}


def test_a_server_that_reports_its_kv_is_believed() -> None:
    spans = [{"version": "0.4", "start": 0, "end": 3}]
    assert _kv_of_what_was_held(12, kv_versions=spans) == {PolicyVersion(0, 4)}


@pytest.mark.parametrize("keeps_kv", [True, False])
def test_a_request_that_keeps_its_kv_over_a_swap_attends_to_its_oldest(keeps_kv: bool) -> None:
    answer = _answer()
    del answer["meta_info"]["kv_versions"]
    generation = parse_generation(answer, _request(), keeps_kv)
    kept = (VersionSpan(PolicyVersion(0, 3), 0, 3),)
    assert generation.kv_versions == (kept if keeps_kv else generation.versions)


def test_an_abort_before_the_first_token_has_nothing_to_align() -> None:
    answer = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "queued"}}}
    generation = parse_generation(answer, _request())
    assert (len(generation.token_ids), generation.versions, generation.finish) == (0, (), FinishReason.ABORT)


BREACHES: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "a logprob too few": (("output_token_logprobs",), [[-0.5, 8, None]], "the 1 logprobs are not of the 3 output_ids"),
    "a logprob that is no number": (("output_token_logprobs", "1"), [None, 9, None], "not finite"),
    "a logprob that is NaN": (("output_token_logprobs", "1"), [math.nan, 9, None], "not finite"),
    "a logprob that is infinite": (("output_token_logprobs", "1"), [-math.inf, 9, None], "not finite"),
    "a logprob that is text": (("output_token_logprobs", "1"), ["x", 9, None], "ValueError"),
    "a logprob of another token": (("output_token_logprobs", "1"), [-0.5, 8, None], "not of the 3 output_ids"),
    "an empty logprob entry": (("output_token_logprobs", "1"), [], "IndexError"),
    "no logprobs": (("output_token_logprobs",), None, "TypeError"),
    "a gap between spans": (("weight_versions", "1", "start"), 2, "version spans"),
    "spans that end early": (("weight_versions", "1", "end"), 2, "version spans"),
    "a span without end": (("weight_versions", "1", "end"), None, "TypeError"),
    "no spans": (("weight_versions",), [], "version spans"),
    "a KV span that ends late": (("kv_versions", "0", "end"), 4, "KV version spans"),
    "a label that is no version": (("weight_versions", "0", "version"), "default", "'default' is not a policy"),
    "an unknown ending": (("finish_reason", "type"), "tired", "tired"),
    "no ending": (("finish_reason",), None, "TypeError"),
    "a cache count that is no number": (("cached_tokens",), None, "TypeError"),
}


@pytest.mark.parametrize("name", BREACHES)
def test_a_breach_of_the_contract_is_an_episode_failure(name: str) -> None:
    path, value, message = BREACHES[name]
    answer = _answer()
    place: Any = answer["meta_info"]
    for key in path[:-1]:
        place = place[int(key) if key.isdigit() else key]
    place[int(path[-1]) if path[-1].isdigit() else path[-1]] = value
    with pytest.raises(EpisodeError, match=message) as caught:
        parse_generation(answer, _request())
    assert (caught.value.failure.boundary, caught.value.failure.kind) == (Boundary.CONTRACT, "engine.answer")


@pytest.mark.parametrize("ids", [[8, "nine", 1], [8, 2**40, 1], None, [8, 9], [8.5, 9, 1], [[8], [9], [1]]])
def test_token_ids_that_are_none_are_a_breach(ids: Any) -> None:
    answer = copy.deepcopy(_answer()) | {"output_ids": ids}
    with pytest.raises(EpisodeError):
        parse_generation(answer, _request())


@pytest.mark.parametrize("mask", [[[8], [9]], [[8], 9, [1]], [[8], [7], [1]], [[8], [], [1]], None, [[8], [None], [1]]])
def test_kept_sets_that_do_not_align_are_a_breach(mask: Any) -> None:
    answer = _answer()
    answer["meta_info"]["output_token_sampling_mask"] = mask
    with pytest.raises(EpisodeError):
        parse_generation(answer, _request(top_k=20))
