from __future__ import annotations

from typing import Any

import pytest

from agentrl.config.base import parse_config
from agentrl.orchestration.config import RunConfig, chosen_policy
from agentrl.types.errors import ConfigError


def _config(max_staleness: Any, **algorithm: Any) -> RunConfig:
    table = {
        "name": "test",
        "steps": 1,
        "policies": {"main": {"model": "/model", "algorithm": algorithm}},
        "environment": {"name": "sql"},
        "buffer": {"max_staleness": max_staleness},
    }
    return parse_config(RunConfig, table, "recipe.toml")


def test_tokens_of_any_age_are_trained_under_a_correction_only():
    refusal = r"nothing corrects for that: set policies\.main\.algorithm\.correction\.kind = 'tis' or 'icepop'"
    with pytest.raises(ConfigError, match=refusal):
        _config("unbounded", correction={"kind": "none"})
    for kind in ("tis", "icepop"):
        assert _config("unbounded", correction={"kind": kind}).buffer.max_staleness == "unbounded"
    assert _config(4, correction={"kind": "none"}).buffer.max_staleness == 4


@pytest.mark.parametrize("loss", [{"kind": "cispo"}, {"kind": "dppo"}, {"kind": "ppo", "proximal": "behaviour"}])
def test_a_loss_against_the_policy_that_sampled_is_a_correction(loss: dict[str, str]):
    assert not _config("unbounded", loss=loss, correction={"kind": "none"}).is_deterministic


@pytest.mark.parametrize("wrong", [-1, 2.5, "none"])
def test_a_bound_is_a_number_of_steps_or_unbounded(wrong: Any):
    with pytest.raises(ConfigError, match="'unbounded'"):
        _config(wrong)


def _table(**sections: Any) -> dict[str, Any]:
    """A recipe of two policies, white and black, that act in one environment."""
    both = ("white", "black")
    return {
        "name": "test",
        "steps": 1,
        "policies": {name: {"model": f"/{name}"} for name in both},
        "environments": {"chess": {"name": "sql", "agents": {name: name for name in both}}},
        **sections,
    }


def _parse(table: dict[str, Any]) -> RunConfig:
    return parse_config(RunConfig, table, "recipe.toml")


def test_sections_of_one_environment_are_an_environment_of_its_name():
    table = {
        "name": "test",
        "steps": 1,
        "policies": {"main": {"model": "/model"}},
        "environment": {"name": "some.module:game", "options": {"size": 3}},
        "scaffold": {"name": "tool_calling", "options": {"system_prompt": "play"}},
    }
    config = _parse(table)
    section = config.environments["game"]
    assert list(config.environments) == ["game"]
    assert (section.name, section.options, section.weight) == ("some.module:game", {"size": 3}, 1.0)
    assert section.scaffold.options == {"system_prompt": "play"}
    assert config.agents_of("game") == {"agent": "main"}
    assert _parse(config.model_dump(mode="json")) == config, "a run's folder has it resolved"


@pytest.mark.parametrize("extra", ["environment", "scaffold"])
def test_both_forms_at_once_are_refused(extra: str):
    with pytest.raises(ConfigError, match=f"unknown key '{extra}'"):
        _parse(_table(**{extra: {"name": "sql"}}))


def test_an_agent_of_an_unknown_policy_is_refused_with_those_that_there_are():
    table = _table()
    table["environments"]["chess"]["agents"]["black"] = "blakc"
    with pytest.raises(
        ConfigError, match=r"environments\.chess\.agents: no policies \['blakc'\]; the recipe has white, b"
    ):
        _parse(table)


def test_of_several_policies_the_recipe_says_which_agent_acts_by_which():
    with pytest.raises(ConfigError, match=r"environments\.chess\.agents is missing: .* of the policies white, black"):
        _parse(_table(environments={"chess": {"name": "sql"}}))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_policy_that_no_agent_acts_by_is_refused_even_if_it_is_frozen(frozen: bool):
    table = _table()
    table["policies"]["judge"] = {"model": "/judge", "frozen": frozen}
    with pytest.raises(ConfigError, match=r"policies \['judge'\]: no agent acts by them; name them in environments"):
        _parse(table)


def test_a_run_that_would_train_nothing_is_refused():
    table = _table()
    for policy in table["policies"].values():
        policy["frozen"] = True
    with pytest.raises(ConfigError, match="every policy is frozen"):
        _parse(table)


def test_a_frozen_policy_acts_and_is_not_trained():
    table = _table()
    table["policies"]["black"]["frozen"] = True
    config = _parse(table)
    assert (config.trained, config.trained_in("chess")) == (("white",), ("white",))
    assert config.agents_of("chess") == {"white": "white", "black": "black"}
    assert chosen_policy(config, None) == "white"
    with pytest.raises(ConfigError, match="no trained policy 'black'; there are white"):
        chosen_policy(config, "black")


def test_which_of_several_policies_is_meant_must_be_said():
    config = _parse(_table())
    assert chosen_policy(config, "black") == "black"
    with pytest.raises(ConfigError, match="the run trains white, black: say which with --policy"):
        chosen_policy(config, None)


def test_a_policy_has_its_own_terms_where_the_recipe_says_so():
    table = _table(buffer={"group_size": 4, "max_staleness": 2}, rollout={"sampling": {"temperature": 0.5}})
    table["policies"]["black"] |= {
        "buffer": {"group_size": 4, "max_staleness": 0},
        "sampling": {"temperature": 1.0},
        "evaluation": {"interval_steps": 7},
    }
    config = _parse(table)
    assert [config.buffer_of(name).max_staleness for name in config.trained] == [2, 0]
    assert [config.sampling_of(name).temperature for name in config.trained] == [0.5, 1.0]
    assert [config.evaluation_of(name).interval_steps for name in config.trained] == [20, 7]
    assert not config.is_deterministic


def test_groups_of_two_sizes_are_refused():
    table = _table(buffer={"group_size": 4})
    table["policies"]["black"]["buffer"] = {"group_size": 8}
    with pytest.raises(ConfigError, match=r"policies\.black\.buffer\.group_size 8 is not buffer\.group_size 4"):
        _parse(table)


@pytest.mark.parametrize(
    ("scorers", "message"),
    [
        ([{"kind": "verifier"}, {"kind": "verifier"}], "give each a name of its own"),
        ([{"kind": "verifier"}, {"kind": "verifier", "name": "other"}], "one verifier at most"),
        ([{"kind": "verifier", "weight": 0.0}], "weigh nothing"),
        ([{"kind": "judge"}], "a scorer of kind 'judge': name is missing"),
    ],
)
def test_scorers_that_make_no_reward_are_refused(scorers: list[dict[str, Any]], message: str):
    table = _table()
    table["environments"]["chess"]["scorers"] = scorers
    with pytest.raises(ConfigError, match=message):
        _parse(table)


def test_a_policy_is_evaluated_where_an_environment_of_its_own_is():
    table = _table()
    table["environments"] |= {"alone": {"name": "sql", "agents": {"white": "white"}, "evaluated": False}}
    table["environments"]["chess"]["evaluated"] = False
    table["environments"]["last"] = {"name": "sql", "agents": {"black": "black"}}
    config = _parse(table)
    assert [config.is_evaluated(name) for name in config.trained] == [False, True]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"journal": {"kind": "none"}}, r"journal\.kind is 'none'; set it to 'segments', or buffer\.forks to 0"),
        ({}, r"several agents act in environments\.chess, and only episodes of one agent can be forked"),
    ],
)
def test_forks_need_a_journal_and_a_single_agent(section: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        _parse(_table(buffer={"group_size": 4, "forks": 2}, **section))


def test_policies_agree_on_forks():
    table = _table(buffer={"group_size": 4, "forks": 2})
    table["policies"]["white"]["buffer"] = {"group_size": 4}
    with pytest.raises(ConfigError, match=r"policies\.white\.buffer\.forks 0 is not buffer\.forks 2"):
        _parse(table)
