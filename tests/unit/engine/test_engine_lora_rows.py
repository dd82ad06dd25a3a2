from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import make_scheduler, step

from agentrl.engine.lora import ServedAdapters
from agentrl.engine.model import ServedModel, load_network
from agentrl.engine.options import EngineOptions
from agentrl.engine.peft import LoraAdapter, LoraPair
from agentrl.engine.request import BadRequestError, DrawParams, Request
from agentrl.engine.scheduler import PauseMode

UP, Q = "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"  # [64, 32] and [32, 32]
SHAPES = {UP: (64, 32), Q: (32, 32)}
PROMPT = [20, 31, 42, 53, 64, 75, 86, 97, 108, 119]


def _adapter(seed: int, rank: int, *modules: str, scale: float = 1.0) -> LoraAdapter:
    generator = torch.Generator().manual_seed(seed)

    def pair(out_features: int, in_features: int) -> LoraPair:
        a = torch.randn(rank, in_features, generator=generator) * 0.3
        return LoraPair(a, torch.randn(out_features, rank, generator=generator) * 0.3)

    return LoraAdapter({module: pair(*SHAPES[module]) for module in modules}, scale)


ADAPTERS = {3: _adapter(3, 2, UP, Q), 5: _adapter(5, 4, UP, scale=0.5), 8: _adapter(8, 1, Q)}


@pytest.fixture(scope="module")
def network(tiny_model: Path) -> torch.nn.Module:
    return load_network(tiny_model, torch.float32, "cpu")


@pytest.fixture(scope="module")
def served(network: torch.nn.Module) -> ServedAdapters:
    served = ServedAdapters(network)
    for serial, adapter in ADAPTERS.items():
        served.put(serial, served.fitted(adapter))
    return served


@settings(max_examples=40)
@given(serials=st.lists(st.sampled_from([0, 3, 5, 8, 99]), min_size=1, max_size=6), is_flat=st.booleans())
def test_each_row_gets_its_own_adapters_change(
    network: torch.nn.Module, served: ServedAdapters, serials: list[int], is_flat: bool
) -> None:
    served.select(np.asarray(serials))
    for name, (_, in_features) in SHAPES.items():
        linear = network.get_submodule(name)
        input_BTI = torch.randn(len(serials), 3, in_features)
        output_BTO = linear(input_BTI.flatten(0, 1) if is_flat else input_BTI).reshape(len(serials), 3, -1)
        for row, serial in enumerate(serials):
            adapter = ADAPTERS.get(serial, LoraAdapter({}))
            pair = adapter.pairs.get(name)
            weight = linear.weight if pair is None else linear.weight + adapter.scale * pair.b_OR @ pair.a_RI
            assert torch.allclose(output_BTO[row], input_BTI[row] @ weight.T, atol=1e-4)


def test_rows_without_an_adapter_are_untouched_to_the_last_bit(
    network: torch.nn.Module, served: ServedAdapters
) -> None:
    linear = network.get_submodule(UP)
    input_BTI = torch.randn(3, 2, 32)
    served.select(np.asarray([0, 0, 0]))
    bare_BTO = linear(input_BTI)
    served.select(np.asarray([0, 3, 0]))
    mixed_BTO = linear(input_BTI)
    assert torch.equal(mixed_BTO[::2], bare_BTO[::2])
    assert not torch.equal(mixed_BTO[1], bare_BTO[1])


def test_modules_that_were_changed_have_hooks_until_no_adapter_is_left(tiny_model: Path) -> None:
    network = load_network(tiny_model, torch.float32, "cpu")
    served = ServedAdapters(network)

    def hooked() -> set[str]:
        return {name for name, module in network.named_modules() if module._forward_hooks}

    assert hooked() == set()
    served.put(1, served.fitted(ADAPTERS[5]))
    served.put(2, served.fitted(ADAPTERS[8]))
    assert hooked() == {UP, Q}
    served.remove(1)
    assert hooked() == {Q}
    served.remove(2)
    assert hooked() == set()


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ({"lm_head": LoraPair(torch.zeros(2, 32), torch.zeros(400, 2))}, "no linear module lm_head inside its layers"),
        ({"model.norm": LoraPair(torch.zeros(2, 32), torch.zeros(32, 2))}, "no linear module model.norm"),
        ({UP: LoraPair(torch.zeros(2, 33), torch.zeros(64, 2))}, r"shape \(64, 33\), the module's is \(64, 32\)"),
    ],
)
def test_an_adapter_that_does_not_fit_changes_nothing(
    tiny_model: Path, pairs: dict[str, LoraPair], reason: str
) -> None:
    network = load_network(tiny_model, torch.float32, "cpu")
    served = ServedAdapters(network)
    with pytest.raises(BadRequestError, match=reason):
        served.fitted(LoraAdapter({**ADAPTERS[8].pairs, **pairs}))
    assert not any(module._forward_hooks for module in network.modules())


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ServedModel:
    model = ServedModel(EngineOptions(model=tiny_model, port=1, max_running_requests=4))
    for serial, adapter in ADAPTERS.items():
        model.lora.put(serial, model.lora.fitted(adapter))
    return model


def _run(model: ServedModel, adapters: list[int], pause_after: int | None = None) -> list[Request]:
    scheduler = make_scheduler(model, 4, prefill_tokens=8)
    params = DrawParams(6, 1.0, 0, 1.0, frozenset(), 7)
    requests = [Request(f"r{n}", PROMPT, params, False, None, None, a) for n, a in enumerate(adapters)]
    for request in requests:
        scheduler.submit(request)
    for number in range(100):
        if number == pause_after:
            scheduler.pause(PauseMode.RETRACT)
            scheduler.resume()
        step(scheduler)
    assert all(request.finish_reason for request in requests)
    return requests


@pytest.mark.parametrize("pause_after", [None, 3, 6, 9])
def test_requests_of_different_adapters_do_not_disturb_each_other(model: ServedModel, pause_after: int | None) -> None:
    alone = {serial: _run(model, [serial])[0] for serial in (0, 3, 5, 8)}
    assert len({tuple(request.logprobs) for request in alone.values()}) == 4
    adapters = [3, 0, 5, 3, 8, 0, 5, 5, 3]
    for request, serial in zip(_run(model, adapters, pause_after), adapters, strict=True):
        assert request.output_ids == alone[serial].output_ids
        assert request.logprobs == pytest.approx(alone[serial].logprobs, abs=1e-4)
