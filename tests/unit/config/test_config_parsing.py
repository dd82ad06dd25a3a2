from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import Field, ValidationError

from agentrl.algorithms.config import AlgorithmConfig, IcePopConfig, PpoConfig, TisConfig
from agentrl.config.base import ConfigModel, parse_config
from agentrl.orchestration.config import RunConfig
from agentrl.rollouts.config import RolloutConfig, SamplingConfig
from agentrl.trainer.config import TrainerConfig
from agentrl.types.errors import ConfigError
from agentrl.types.generation import Sampling


class Inner(ConfigModel):
    learning_rate: Annotated[float, Field(gt=0)] = 1.0


class Outer(ConfigModel):
    inner: Inner = Inner()
    named: dict[str, Inner] = Field(default_factory=dict)
    steps: int = 1


def refused(kind: type[ConfigModel], values: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(kind, values, "recipe.toml")
    return str(caught.value)


def test_an_unknown_key_is_refused_with_the_nearest_name():
    assert refused(Outer, {"stesp": 3}) == "recipe.toml: unknown key 'stesp'; did you mean 'steps'?"


def test_an_unknown_key_in_a_section_is_named_with_its_path():
    message = refused(Outer, {"inner": {"learning_rat": 3}})
    assert "unknown key 'inner.learning_rat'; did you mean 'learning_rate'?" in message


def test_an_unknown_key_below_a_free_name_is_looked_up_in_its_section():
    assert "did you mean 'learning_rate'?" in refused(Outer, {"named": {"main": {"learningrate": 3}}})


def test_a_key_like_no_other_is_answered_with_all_that_are_known():
    assert "known keys here: inner, named, steps" in refused(Outer, {"zzz": 3})


def test_every_fault_is_listed_at_once():
    message = refused(Outer, {"steps": "many", "inner": {"learning_rate": -1}})
    assert "steps" in message
    assert "inner.learning_rate" in message
    assert "'many'" in message
    assert "-1" in message


def test_keys_of_a_chosen_loss_have_hints_too():
    assert "did you mean 'clip_low'?" in refused(AlgorithmConfig, {"loss": {"kind": "ppo", "clip_lo": 0.1}})


def test_a_key_of_another_loss_is_refused():
    assert "threshold" in refused(AlgorithmConfig, {"loss": {"kind": "ppo", "threshold": 0.1}})


def test_an_unknown_kind_of_loss_is_refused_with_the_kinds_there_are():
    message = refused(AlgorithmConfig, {"loss": {"kind": "pppo"}})
    assert all(kind in message for kind in ("ppo", "cispo", "dppo"))


def test_a_whole_run_names_a_wrong_key_four_levels_down():
    values = {
        "name": "x",
        "steps": 1,
        "environment": {"name": "sql"},
        "policies": {"main": {"model": "m", "trainer": {"optimizer": {"momentun": 0.5}}}},
    }
    assert "'policies.main.trainer.optimizer.momentun'; did you mean 'momentum'?" in refused(RunConfig, values)


def test_kinds_choose_their_sections():
    config = parse_config(AlgorithmConfig, {"correction": {"kind": "icepop", "low": 0.1}}, "x")
    assert config.correction == IcePopConfig(low=0.1)
    assert config.loss == PpoConfig()
    assert AlgorithmConfig().correction == TisConfig()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (TrainerConfig, {"ranks": 0}),
        (TrainerConfig, {"micro_batch_tokens": -1}),
        (TrainerConfig, {"optimizer": {"learning_rate": 0}}),
        (TrainerConfig, {"optimizer": {"momentum": 1.0}}),
        (AlgorithmConfig, {"loss": {"kind": "ppo", "clip_low": 0}}),
        (AlgorithmConfig, {"correction": {"kind": "tis", "cap": 0}}),
        (RolloutConfig, {"sampling": {"temperature": -0.1}}),
        (RolloutConfig, {"sampling": {"top_p": 0, "top_k": 5}}),
    ],
)
def test_values_out_of_range_are_refused(kind, values):
    refused(kind, values)


def test_top_p_without_top_k_is_refused_with_the_remedy():
    assert "set top_k" in refused(SamplingConfig, {"top_p": 0.9})


def test_top_p_with_top_k_builds_the_record_that_requests_carry():
    config = parse_config(SamplingConfig, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}, "x")
    assert config.build() == Sampling(0.7, 20, 0.9)
    assert SamplingConfig().build() == Sampling(1.0, None, 1.0)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Outer().steps = 2


def test_a_configuration_survives_a_dump():
    config = parse_config(AlgorithmConfig, {"loss": {"kind": "dppo", "kl_weight": 0.5}, "advantage": "dr_grpo"}, "x")
    assert AlgorithmConfig.model_validate(config.model_dump()) == config
