from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from engine_server import EngineCalls, Reference, copy_model, logprobs_of, pickled, spans_of
from running_request import MANY_TOKENS
from safetensors.torch import load_file

from agentrl.inference.checksum import tensor_checksum
from agentrl.weights.payloads import shared_payload

pytestmark = pytest.mark.long

PROMPT = [20, 31, 42, 53, 64, 75, 86]


async def _check_new_weights(engine: EngineCalls, reference: Reference, version: str = "0.1") -> None:
    answer = await engine.generate(PROMPT, max_new_tokens=10, ignore_eos=True)
    assert spans_of(answer) == [(version, 0, 10)]
    expected = reference.sampled(engine.server.other_model, PROMPT, answer["output_ids"])
    assert logprobs_of(answer) == pytest.approx(expected, abs=1e-3)
    served = (await engine.ok("/weights_checker", action="checksum"))["checksums"]
    tensors = load_file(engine.server.other_model / "model.safetensors")
    assert served == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


async def test_weights_staged_while_tokens_flow_are_served_by_the_update_that_names_them(
    embedded: EngineCalls, reference: Reference
) -> None:
    request = await embedded.start_running(PROMPT, "flows-on-0001")
    before = await embedded.ok("/weights_checker", action="checksum")
    body = {"model_path": str(embedded.server.other_model), "weight_version": "0.1"}
    await embedded.ok("/stage_weights", **body)
    assert not request.answer.done()
    assert await embedded.ok("/weights_checker", action="checksum") == before
    await embedded.ok("/pause_generation", mode="abort")
    assert {span[0] for span in spans_of(await request.answer)} == {"0.0"}
    await embedded.ok("/update_weights_from_disk", **body)
    await embedded.ok("/continue_generation")
    await _check_new_weights(embedded, reference)


async def test_a_swap_in_place_exchanges_weights_between_two_tokens(
    embedded: EngineCalls, reference: Reference
) -> None:
    tensors = list(load_file(embedded.server.other_model / "model.safetensors").items())
    for piece in (tensors[:4], tensors[4:]):
        payload = shared_payload(piece)
        await embedded.ok("/stage_weights", serialized_named_tensors=[payload], weight_version="0.1")
    request = await embedded.start_running(PROMPT, "swapped-under-0001")
    await embedded.ok("/swap_weights", weight_version="0.1", in_place=True)
    answer = await request.stop_after(MANY_TOKENS)
    (_, _, switch), (version, _, end) = spans_of(answer)
    assert (version, end) == ("0.1", len(answer["output_ids"]))
    assert spans_of(answer, "kv_versions") == [("0.0", 0, end)]
    before = reference.sampled(embedded.server.model, PROMPT, answer["output_ids"])[:switch]
    assert logprobs_of(answer)[:switch] == pytest.approx(before, abs=1e-3)
    await _check_new_weights(embedded, reference)


async def test_a_folder_that_changed_since_it_was_staged_is_read_again(
    embedded: EngineCalls, reference: Reference, tmp_path: Path
) -> None:
    folder = copy_model(embedded.server.model, tmp_path / "model", seed=7)
    await embedded.ok("/stage_weights", model_path=str(folder), weight_version="0.1")
    shutil.copy(embedded.server.other_model / "model.safetensors", folder / "model.safetensors")
    await embedded.load(folder, "0.1")
    await _check_new_weights(embedded, reference)


async def test_staging_what_the_model_lacks_is_refused_at_once(embedded: EngineCalls) -> None:
    payload = pickled([("unheard.of", torch.zeros(1))])
    body = {"serialized_named_tensors": [payload], "weight_version": "0.9"}
    assert "unheard.of" in await embedded.refused("/stage_weights", **body)
    assert "nothing is staged" in await embedded.refused("/swap_weights", weight_version="0.9")
    assert "weight_version" in await embedded.refused("/stage_weights", model_path="/no/such")


async def test_staged_weights_are_served_once_and_under_their_own_version_only(
    embedded: EngineCalls, reference: Reference
) -> None:
    await embedded.ok("/stage_weights", model_path=str(embedded.server.other_model), weight_version="0.1")
    assert "as version 0.2" in await embedded.refused("/swap_weights", weight_version="0.2")
    await embedded.ok("/swap_weights", weight_version="0.1")
    assert "nothing is staged" in await embedded.refused("/swap_weights", weight_version="0.1")
    await _check_new_weights(embedded, reference)
