from __future__ import annotations

import builtins

import pytest
from pydantic import TypeAdapter, ValidationError

from agentrl.cluster.config import LocalRuntimeConfig, RayRuntimeConfig, RuntimeConfig, resources_of
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.places import build_places, members_of
from agentrl.process.local_place import LocalPlaces
from agentrl.process.place import Role
from agentrl.types.errors import ConfigError

SECTION = TypeAdapter(RuntimeConfig)
RECIPE = {
    "name": "test",
    "steps": 1,
    "policies": {"main": {"model": "model", "engine": {"kind": "embedded", "count": 2}, "trainer": {"ranks": 3}}},
    "environment": {"name": "facts"},
    "rollout": {"workers": 4},
}


def recipe(**sections: object) -> RunConfig:
    return RunConfig.model_validate({**RECIPE, **sections})


def test_a_recipe_says_by_kind_where_processes_are_and_without_it_they_are_here():
    assert recipe().runtime == LocalRuntimeConfig()
    assert recipe(runtime={"colocated": True}).runtime == LocalRuntimeConfig(colocated=True)
    found = recipe(runtime={"kind": "ray", "address": "10.0.0.1:6379", "engines": {"gpus": 0.5}}).runtime
    assert isinstance(found, RayRuntimeConfig)
    assert (found.address, found.engines.gpus) == ("10.0.0.1:6379", 0.5)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"kind": "slurm"}, "'local', 'ray'"),
        ({"kind": "local", "address": "auto"}, "address"),
        ({"kind": "ray", "address": "ray://10.0.0.1:10001"}, "ray job submit"),
        ({"kind": "ray", "address": "10.0.0.1"}, "10.0.0.1:6379"),
        ({"kind": "ray", "address": ":6379"}, "HOST:PORT"),
        ({"kind": "ray", "workers": {"cpus": 0}}, "workers.cpus"),
        ({"kind": "ray", "engines": {"resources": {"rack": 0}}}, "rack"),
        ({"kind": "ray", "wait_s": 0}, "wait_s"),
    ],
)
def test_what_cannot_be_meant_is_refused(section, words):
    with pytest.raises(ValidationError, match=words):
        SECTION.validate_python(section)


@pytest.mark.parametrize("address", ["auto", "local", "head.example:6379", "10.0.0.1:6379"])
def test_addresses_that_can_be_joined_are_taken(address):
    assert SECTION.validate_python({"kind": "ray", "address": address}).address == address


def test_a_role_takes_what_its_section_says_under_the_names_that_ray_has():
    given = {"engines": {"gpus": 1}, "trainer": {"cpus": 4, "gpus": 2}, "workers": {"cpus": 0.5, "resources": {"r": 1}}}
    config = SECTION.validate_python({"kind": "ray", **given})
    assert resources_of(config, Role.ENGINE) == {"CPU": 1, "GPU": 1}
    assert resources_of(config, Role.TRAINER) == {"CPU": 4, "GPU": 2}
    assert resources_of(config, Role.WORKER) == {"CPU": 0.5, "r": 1}
    assert resources_of(config, Role.EVALUATOR) == resources_of(config, Role.SCORER) == {"CPU": 1}


def test_members_are_all_that_the_recipe_starts_with_evaluation_s_engine_and_worker():
    assert members_of(recipe()) == {
        Role.ENGINE: 3,
        Role.TRAINER: 3,
        Role.WORKER: 4,
        Role.EVALUATOR: 1,
        Role.SCORER: 0,
        Role.ENVIRONMENT: 0,
    }
    alone = recipe(evaluation={"interval_steps": 0, "final_tasks": 0}, rollout={"workers": 0})
    others = dict.fromkeys((Role.WORKER, Role.EVALUATOR, Role.SCORER, Role.ENVIRONMENT), 0)
    assert members_of(alone) == {Role.ENGINE: 2, Role.TRAINER: 3, **others}


async def test_a_run_on_this_machine_needs_no_ray_and_one_on_a_cluster_names_the_extra(monkeypatch):
    real = builtins.__import__

    def without_ray(name, *arguments, **settings):
        if name == "ray" or name.startswith(("ray.", "agentrl.cluster.places")):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return real(name, *arguments, **settings)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    assert isinstance(await build_places(recipe()), LocalPlaces)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl\[ray\]'"):
        await build_places(recipe(runtime={"kind": "ray"}))


def test_an_elastic_run_cannot_begin_without_an_engine_of_each_policy_one_worker_and_what_evaluates():
    runtime, two = {"kind": "ray", "elastic": True}, {"main": RECIPE["policies"]["main"], "other": {"model": "model"}}
    assert members_of(recipe(runtime=runtime))[Role.ENGINE] == 2, "of two, and the evaluation's"
    agents = {"name": "signals", "agents": {"speaker": "main", "listener": "other"}}
    found = members_of(recipe(runtime=runtime, policies=two, environment=agents))
    assert found == {
        Role.ENGINE: 4,
        Role.TRAINER: 4,
        Role.WORKER: 1,
        Role.EVALUATOR: 1,
        Role.SCORER: 0,
        Role.ENVIRONMENT: 0,
    }
