from __future__ import annotations

import itertools
import math

import pytest
from engine_server import EngineCalls, Reference, finish_of, logprobs_of, spans_of

PROMPT = [20, 31, 42, 53, 64, 75, 86]


async def test_an_answer_carries_tokens_logprobs_finish_and_version_spans(engine: EngineCalls) -> None:
    answer = await engine.generate(PROMPT, "the-rid-of-this-request", max_new_tokens=5, ignore_eos=True)
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == meta["completion_tokens"] == meta["output_token_logprobs_length"] == 5
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["id"] == "the-rid-of-this-request"
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert spans_of(answer) == [("0.0", 0, 5)]
    assert meta["weight_version"] == "0.0"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_sampled_logprobs_equal_hugging_face(
    engine: EngineCalls, reference: Reference, temperature: float
) -> None:
    answer = await engine.generate(PROMPT, max_new_tokens=40, temperature=temperature, ignore_eos=True)
    expected = reference.sampled(engine.server.model, PROMPT, answer["output_ids"], temperature)
    assert logprobs_of(answer) == pytest.approx(expected, abs=1e-3)


async def test_temperature_0_takes_the_likeliest_token_each_time(engine: EngineCalls, reference: Reference) -> None:
    answer = await engine.generate(PROMPT, max_new_tokens=20, temperature=0, ignore_eos=True)
    output = answer["output_ids"]
    best = reference.distributions(engine.server.model, PROMPT + output).argmax(-1).tolist()
    assert output == best[len(PROMPT) - 1 : -1]


async def test_a_stop_token_ends_the_output_and_belongs_to_it(engine: EngineCalls) -> None:
    whole = (await engine.generate(PROMPT, max_new_tokens=20, temperature=0))["output_ids"]
    stop = whole[10]
    answer = await engine.generate(PROMPT, max_new_tokens=20, temperature=0, stop_token_ids=[stop])
    assert answer["output_ids"] == whole[: whole.index(stop) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_the_models_own_end_token_stops_unless_it_is_ignored(engine: EngineCalls) -> None:
    prompts = [[token, *PROMPT] for token in range(10, 18)]
    sampling = {"max_new_tokens": 1500, "temperature": 1.5}  # five times as many as it takes on average
    body = {"input_ids": prompts, "sampling_params": sampling}
    stopped = [a for a in await engine.ok("/generate", **body) if finish_of(a) == "stop"]
    assert stopped
    assert {a["meta_info"]["finish_reason"]["matched"] for a in stopped} == {1}
    assert all(a["output_ids"][-1] == 1 and 1 not in a["output_ids"][:-1] for a in stopped)
    endless = {"max_new_tokens": 250, "ignore_eos": True}
    answers = await engine.ok("/generate", **body | {"sampling_params": sampling | endless})
    assert {len(answer["output_ids"]) for answer in answers} == {250}


async def test_a_batch_is_answered_in_the_order_of_its_prompts(engine: EngineCalls, reference: Reference) -> None:
    prompts = [[30 + n] * (1 + 3 * n) for n in range(9)]
    rids = [f"batch-member-{n:04d}" for n in range(9)]
    sampling = {"max_new_tokens": 6, "ignore_eos": True}
    answers = await engine.ok("/generate", input_ids=prompts, rid=rids, sampling_params=sampling, return_logprob=True)
    assert [answer["meta_info"]["id"] for answer in answers] == rids
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference.sampled(engine.server.model, prompt, answer["output_ids"])
        assert logprobs_of(answer) == pytest.approx(expected, abs=1e-3)


async def test_a_stream_grows_and_names_the_versions_at_its_end(engine: EngineCalls) -> None:
    events = [event async for event in engine.stream(PROMPT, max_new_tokens=12, ignore_eos=True)]
    assert events.pop() == "[DONE]"
    outputs = [event["output_ids"] for event in events]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(outputs))
    assert len(outputs) > 1
    assert len(outputs[-1]) == len(logprobs_of(events[-1])) == 12
    assert finish_of(events[-1]) == "length"
    assert spans_of(events[-1]) == [("0.0", 0, 12)]


async def test_a_prompt_longer_than_a_step_is_scored_as_hugging_face_does(
    engine: EngineCalls, reference: Reference
) -> None:
    prompt = [(7 * n) % 290 + 10 for n in range(150)]
    answer = await engine.generate(prompt, max_new_tokens=0, logprob_start_len=0)
    entries = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == prompt
    assert entries[0][0] is None
    expected = reference.logprobs(engine.server.model, prompt)
    assert [entry[0] for entry in entries[1:]] == pytest.approx(expected, abs=1e-4)
    assert answer["output_ids"] == []
    assert answer["meta_info"]["cached_tokens"] == 0


async def test_scoring_may_start_within_the_prompt_and_go_on_generating(
    engine: EngineCalls, reference: Reference
) -> None:
    answer = await engine.generate(PROMPT, max_new_tokens=3, logprob_start_len=4, ignore_eos=True)
    entries = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == PROMPT[4:]
    expected = reference.logprobs(engine.server.model, PROMPT)[4:]
    assert [entry[0] for entry in entries[1:]] == pytest.approx(expected, abs=1e-4)
    assert len(answer["output_ids"]) == 3


async def test_the_kept_set_is_what_truncation_left_and_logprobs_are_renormalised_over_it(
    engine: EngineCalls, reference: Reference
) -> None:
    answer = await engine.generate(
        PROMPT, max_new_tokens=12, temperature=0.8, top_k=20, top_p=0.1, return_sampling_mask=True, ignore_eos=True
    )
    meta, output = answer["meta_info"], answer["output_ids"]
    assert meta["output_token_sampling_mask_length"] == 12
    tables = reference.distributions(engine.server.model, PROMPT + output, 0.8)[len(PROMPT) - 1 :]
    sizes = set()
    for at, token in enumerate(output):
        kept, logprob = meta["output_token_sampling_mask"][at], meta["output_token_sampling_logprobs"][at]
        likeliest = tables[at].topk(len(kept))
        assert set(kept) == set(likeliest.indices.tolist())
        probs = likeliest.values.exp()
        assert len(kept) == 20 or float(probs.sum()) >= 0.1 - 1e-4
        assert float(probs[:-1].sum()) < 0.1 + 1e-4
        assert math.exp(logprob) == pytest.approx(float(tables[at][token].exp() / probs.sum()), abs=1e-3)
        assert logprobs_of(answer)[at] == pytest.approx(float(tables[at][token]), abs=1e-3)
        sizes.add(len(kept))
    assert min(sizes) < 20, "top_p cut nothing"


async def test_greedy_tokens_are_alone_in_their_kept_sets(engine: EngineCalls) -> None:
    answer = await engine.generate(PROMPT, max_new_tokens=4, temperature=0, return_sampling_mask=True)
    meta = answer["meta_info"]
    assert meta["output_token_sampling_mask"] == [[token] for token in answer["output_ids"]]
    assert meta["output_token_sampling_logprobs"] == [0.0] * len(answer["output_ids"])


async def test_a_second_turn_starts_from_the_first_ones_tokens(engine: EngineCalls, reference: Reference) -> None:
    prompt = [(11 * n) % 280 + 10 for n in range(60)]
    first = await engine.generate(prompt, max_new_tokens=20, ignore_eos=True)
    longer = [*prompt, *first["output_ids"], 5, 6, 7]
    second = await engine.generate(longer, max_new_tokens=10, ignore_eos=True)
    assert second["meta_info"]["cached_tokens"] >= len(prompt)
    expected = reference.sampled(engine.server.model, longer, second["output_ids"])
    assert logprobs_of(second) == pytest.approx(expected, abs=1e-3)


async def test_the_context_limit_ends_an_output_as_its_length(embedded: EngineCalls) -> None:
    limit = (await embedded.info())["context_length"]
    prompt = [50] * (limit - 3)
    answer = await embedded.generate(prompt, max_new_tokens=100, ignore_eos=True)
    assert len(answer["output_ids"]) == 3
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert "leaves no room" in await embedded.refused(
        "/generate", input_ids=[50] * limit, sampling_params={"max_new_tokens": 1}
    )
