"""The check that stands before a run: what it lets through, what it refuses, and what it remembers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig
from transformers.models.llama import modeling_llama

from agentrl.engine.main import run_engine
from agentrl.engine.options import EngineOptions
from agentrl.engine.verification import check_engine
from agentrl.models import verification as subject
from agentrl.models.attention import AttentionFeatures
from agentrl.models.drawing import write_drawn_model
from agentrl.models.head import LogitScaling, OutputHead
from agentrl.models.probe import SMALL_PARAMETERS, probe_config
from agentrl.models.verification import Verdict, require
from agentrl.models.verified import REFUSED, markdown_table
from agentrl.process.ports import free_port
from agentrl.testing.tiny_architectures import REFUSED as TINY_REFUSED
from agentrl.testing.tiny_architectures import tiny_config
from agentrl.trainer.verification import check_trainer
from agentrl.types.errors import ConfigError

CHECKS = {"trainer": check_trainer, "engine": check_engine}
Check = Callable[[Path], Verdict]


@pytest.fixture(params=CHECKS)
def check(request: pytest.FixtureRequest) -> Check:
    return CHECKS[request.param]


def folder_of(config: PreTrainedConfig, tmp_path: Path) -> Path:
    """A model folder of which only the configuration is there: a check needs no weights."""
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_a_model_that_both_sides_compute_rightly_is_let_through(name, check, tmp_path):
    verdict = check(folder_of(tiny_config(name), tmp_path))
    assert (verdict.architecture, verdict.is_verified, verdict.reason) == (name, True, "")
    assert verdict.max_gap_nats < 1e-5
    require(verdict)


WORDS = {
    "qwen3_next": "layers of kind linear_attention",
    "mamba2": "recurrent layers",
    "falcon_h1": "recurrent layers",
    "opt": r"OPTModel \(opt\) has no `layers`",
    "bloom": r"BloomModel \(bloom\) has no `layers`",
    "llama4_text": "layers of kind chunked_attention",
    "t5": "an encoder and a decoder",
    "qwen2_5_vl": "parts beside its text model",
}


@pytest.mark.parametrize("name", WORDS)
def test_models_that_cannot_run_are_refused_by_name_and_kind(name, check, tmp_path):
    config = AutoConfig.for_model(name) if name == "qwen2_5_vl" else tiny_config(name)
    verdict = check(folder_of(config, tmp_path))
    assert not verdict.is_verified
    message = f"the {verdict.side} cannot run models of type {name}: .*{WORDS[name]}.* Choose .* verified: llama, qwen2"
    with pytest.raises(ConfigError, match=message):
        require(verdict)


def test_the_table_of_refused_models_is_the_tests():
    assert {refused.model_type for refused in REFUSED} == set(WORDS) == set(TINY_REFUSED)
    rows = markdown_table().splitlines()
    assert rows[0].count("|") == rows[-1].count("|") == 4


def test_quantized_weights_are_refused_by_their_method(check, tmp_path):
    config = tiny_config("llama", quantization_config={"quant_method": "mxfp4"})
    assert "quantized (mxfp4)" in check(folder_of(config, tmp_path)).reason


def drop_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    for side in ("trainer", "engine"):
        monkeypatch.setattr(f"agentrl.{side}.attention.read_features", lambda *_: AttentionFeatures())


def drop_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogitScaling, "of", classmethod(lambda cls, config: cls()))


def drop_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = staticmethod(lambda network, scaling: OutputHead(network.get_output_embeddings().weight, None, scaling))
    monkeypatch.setattr(OutputHead, "of", weight)


def drop_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.models.attention._softmax", lambda scores, sinks: scores.softmax(-1))


@pytest.mark.parametrize(
    ("name", "drop"),
    [
        ("mistral_window", drop_windows),
        ("gemma3_text", drop_windows),
        ("phi", drop_bias),
        ("granite", drop_scaling),
        ("cohere", drop_scaling),
        ("gemma2", drop_scaling),
        ("gpt_oss", drop_sinks),
    ],
)
def test_a_feature_that_is_dropped_without_a_word_shows(name, drop, check, tmp_path, monkeypatch):
    drop(monkeypatch)
    verdict = check(folder_of(tiny_config(name), tmp_path))
    assert not verdict.is_verified
    assert verdict.max_gap_nats > 0.01
    with pytest.raises(ConfigError, match=r"nats off those of the same model in plain transformers.*does not know"):
        require(verdict)


class ShiftedConfig(LlamaConfig):
    model_type = "shifted"


class ShiftedAttention(modeling_llama.LlamaAttention):
    """Asks its attention function for something of its own."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs, score_shift=2.0)


class ShiftedForCausalLM(LlamaForCausalLM):
    config_class = ShiftedConfig

    def __init__(self, config: ShiftedConfig) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = ShiftedAttention(config, number)


AutoConfig.register("shifted", ShiftedConfig)
AutoModelForCausalLM.register(ShiftedConfig, ShiftedForCausalLM)


def test_a_model_that_asks_for_an_unknown_keyword_is_refused_by_it(check, tmp_path):
    config = ShiftedConfig(**tiny_config("llama").to_dict() | {"model_type": "shifted"})
    verdict = check(folder_of(config, tmp_path))
    assert not verdict.is_verified
    assert verdict.reason.startswith("the attention of shifted models asks for score_shift, which agentrl does not")


def test_verdicts_are_remembered_until_configuration_or_code_change(check, tmp_path, verdicts, monkeypatch):
    folder = folder_of(tiny_config("llama"), tmp_path)
    first = check(folder)
    (file,) = verdicts.glob("*.json")
    monkeypatch.setattr(subject, "make_probe", lambda *_: pytest.fail("made again"))
    assert check(folder) == first
    known = json.loads(file.read_text())
    file.write_text(json.dumps(known | {"max_gap_nats": 0.5}))
    assert check(folder).max_gap_nats == 0.5
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(verdicts.parent.parent))
    file.write_text("{")
    assert check(folder) == first
    check(folder_of(tiny_config("llama", rms_norm_eps=1e-3), tmp_path))
    assert len(list(verdicts.glob("*.json"))) == 2
    monkeypatch.setattr(subject.transformers, "__version__", "9.9.9")
    check(folder)
    assert len(list(verdicts.glob("*.json"))) == 3


def test_a_check_that_failed_for_want_of_memory_is_made_again(check, tmp_path, verdicts, monkeypatch):
    folder = folder_of(tiny_config("llama"), tmp_path)

    def without_memory(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(subject, "make_probe", without_memory)
    assert "MemoryError: no room" in check(folder).reason
    assert list(verdicts.glob("*")) == []
    monkeypatch.undo()
    assert check(folder).is_verified


def test_a_cache_that_cannot_be_written_costs_only_time(check, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    folder = folder_of(tiny_config("llama"), tmp_path)
    assert check(folder).is_verified
    assert check(folder).is_verified


def test_a_check_leaves_the_random_numbers_of_its_process_alone(check, tmp_path):
    folder = folder_of(tiny_config("llama"), tmp_path)
    torch.manual_seed(5)
    check(folder)
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


def test_a_folder_without_a_model_is_a_configuration_error(check, tmp_path):
    with pytest.raises(ConfigError, match=r"no model at .*nowhere: config\.json is missing"):
        check(tmp_path / "nowhere")


def test_an_engine_does_not_start_with_a_model_that_is_refused(tmp_path):
    config = tiny_config("opt")
    write_drawn_model(config, tmp_path / "model")
    with pytest.raises(ConfigError, match="the engine cannot run models of type opt"):
        run_engine(EngineOptions(model=tmp_path / "model", port=free_port()), supervised=False)


@pytest.mark.parametrize(
    ("model_type", "num_layers"),
    [("llama", 1), ("gemma3_text", 2), ("gpt_oss", 2), ("deepseek_v3", 2), ("glm4_moe", 2), ("smollm3", 2)],
)
def test_of_a_large_model_one_layer_of_each_kind_is_checked(model_type, num_layers, check, tmp_path):
    config = AutoConfig.for_model(model_type)
    small = probe_config(config)
    assert small.num_hidden_layers == num_layers
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(small)
    assert sum(parameter.numel() for parameter in network.parameters()) < SMALL_PARAMETERS
    if model_type in ("llama", "smollm3"):
        assert check(folder_of(config, tmp_path)).is_verified


def test_kinds_that_stand_side_by_side_only_further_on_are_found():
    config = AutoConfig.for_model("qwen3_moe", decoder_sparse_step=3, mlp_only_layers=[2], num_hidden_layers=9)
    small = probe_config(config)
    # Layers 0 to 4 are dense: 2 by name, of the others every third has experts, the first of them 5.
    assert small.num_hidden_layers == 6
