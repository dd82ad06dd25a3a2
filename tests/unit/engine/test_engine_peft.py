from __future__ import annotations

from typing import Any

import pytest
import torch

from agentrl.engine.peft import parse_adapter
from agentrl.engine.request import BadRequestError

MODULE = "model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}


def _tensors(prefix: str = "base_model.model.", infix: str = "") -> dict[str, torch.Tensor]:
    names = [f"{prefix}{MODULE}.lora_{side}{infix}.weight" for side in "AB"]
    return {names[0]: torch.ones(4, 6), names[1]: torch.ones(5, 4)}


@pytest.mark.parametrize(("prefix", "infix"), [("base_model.model.", ""), ("", ""), ("base_model.model.", ".default")])
def test_matrices_are_found_under_each_of_their_names(prefix: str, infix: str) -> None:
    assert set(parse_adapter(CONFIG, _tensors(prefix, infix), max_rank=4).pairs) == {MODULE}


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 2.0), (True, 4.0)])
def test_the_scale_is_alpha_over_rank_or_its_root(use_rslora: bool, scale: float) -> None:
    assert parse_adapter(CONFIG | {"use_rslora": use_rslora}, _tensors(), max_rank=4).scale == scale


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"r": 9}, "rank 9 is above --max-lora-rank 4"),
        ({"r": 2}, r"shapes \(4, 6\) and \(5, 4\), not those of rank 2"),
        ({"r": "4"}, "needs r, an integer above 0"),
        ({"r": 0}, "needs r, an integer above 0"),
        ({"lora_alpha": None}, "lora_alpha, a number"),
        ({"use_dora": True}, "use_dora=True; only plain LoRA is served"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
    ],
)
def test_what_is_not_plain_lora_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequestError, match=reason):
        parse_adapter(CONFIG | change, _tensors(), max_rank=4)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({}, "has no tensors"),
        ({f"{MODULE}.lora_A.weight": torch.ones(4, 6)}, f"only lora_A of {MODULE}"),
        (_tensors() | {f"{MODULE}.lora_B.bias": torch.ones(4)}, "is no matrix of a LoRA adapter"),
        (_tensors() | {"base_model.model.lm_head.weight": torch.ones(4, 6)}, "is no matrix of a LoRA adapter"),
        ({n: t.long() for n, t in _tensors().items()}, "no matrices of floating-point numbers"),
        ({n: t[0] for n, t in _tensors().items()}, "no matrices of floating-point numbers"),
    ],
)
def test_tensors_of_another_kind_are_refused(tensors: dict[str, torch.Tensor], reason: str) -> None:
    with pytest.raises(BadRequestError, match=reason):
        parse_adapter(CONFIG, tensors, max_rank=4)


def test_a_configuration_that_is_no_object_is_refused() -> None:
    with pytest.raises(BadRequestError, match="must be a JSON object"):
        parse_adapter([CONFIG], _tensors(), max_rank=4)
