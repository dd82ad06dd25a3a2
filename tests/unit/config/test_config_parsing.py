from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

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


class Sender(ConfigModel):
    kind: Literal["sender"] = "sender"


class Reader(ConfigModel):
    kind: Literal["reader"]
    batch_tokens: int = 8


class Forked(ConfigModel):
    way: Annotated[Sender | Reader, Field(discriminator="kind")] = Sender()
    inner: Inner = Inner()
    low: int = 0
    high: int = 1

    @model_validator(mode="after")
    def _in_order(self) -> Forked:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


def test_a_kind_alone_stands_for_a_section_of_that_kind():
    assert parse_config(Forked, {"way": "reader"}, "recipe.toml").way == Reader(kind="reader")
    assert "'sender', 'reader'" in refused(Forked, {"way": "writer"})


def test_a_name_that_lies_deeper_or_is_abbreviated_is_found():
    assert refused(Forked, {"lr": 1}).endswith("unknown key 'lr'; did you mean 'inner.learning_rate'?")
    assert refused(Forked, {"learning_rate": 1}).endswith("did you mean 'inner.learning_rate'?")
    assert refused(Forked, {"inner": {"lr": 1}}).endswith("unknown key 'inner.lr'; did you mean 'learning_rate'?")


def test_a_name_that_is_hardly_alike_is_no_hint():
    assert "did you mean 'optimizer.learning_rate'?" in refused(TrainerConfig, {"lr": 1.0})


def test_a_rule_over_several_values_does_not_print_the_section():
    assert refused(Forked, {"low": 3}) == "recipe.toml: low 3 is above high 1"


def test_a_missing_value_is_named_and_nothing_else_is_printed():
    assert "recipe.toml: steps is missing" in refused(RunConfig, {"name": "x", "policies": {}, "environments": {}})


def test_long_values_are_shortened():
    assert len(refused(Outer, {"steps": "x" * 10_000})) < 200


def test_an_override_is_blamed_for_what_it_sets_and_the_recipe_for_the_rest():
    values = {"way": {"kind": "reader", "batch_tokens": "many"}, "low": "few"}
    with pytest.raises(ConfigError) as caught:
        parse_config(Forked, values, "recipe.toml", ["way.kind=reader", "way.batch_tokens=many"])
    of_override, _, of_recipe = str(caught.value).partition("; recipe.toml: ")
    assert of_override.startswith("override 'way.batch_tokens=many': way.reader.batch_tokens: ")
    assert of_recipe.startswith("low: ")


@pytest.mark.parametrize("name", ["../../x", "", "a/b", ".hidden", "x" * 200])
def test_a_run_whose_name_cannot_be_a_folders_is_refused(name):
    values = {"name": name, "steps": 1, "environment": {"name": "sql"}, "policies": {"main": {"model": "m"}}}
    assert "cannot name a folder" in refused(RunConfig, values)


def test_a_policy_whose_name_cannot_be_a_folders_is_refused():
    values = {"name": "x", "steps": 1, "environment": {"name": "sql"}, "policies": {"../main": {"model": "m"}}}
    assert "cannot name a folder" in refused(RunConfig, values)
