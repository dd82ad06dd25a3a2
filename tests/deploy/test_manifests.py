"""What is applied to Kubernetes, and the compose file."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import click
import kubernetes_validate
import pytest
import typer
import yaml

from agentrl.cli.main import app
from agentrl.orchestration.config import load_run_config
from tests.deploy.crds import problems, schemas
from tests.deploy.kuberay import check_cluster, check_core, documents

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose.yml"
IMAGES = {f"agentrl-{path.stem}" for path in (ROOT / "deploy" / "images").glob("*.Dockerfile")}


def _services() -> dict:
    return yaml.safe_load(COMPOSE.read_text())["services"]


def _cluster() -> dict:
    return next(entry for entry in documents() if entry["kind"] == "RayCluster")


def _parse(words: list[str]) -> None:
    """Raises click's usage errors."""
    command: click.Command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, list(words))


def _check_compose(file: Path) -> subprocess.CompletedProcess[str]:
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False)


def test_the_compose_file_is_of_the_compose_specification():
    done = _check_compose(COMPOSE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_misspelt_key_of_a_service_is_refused(tmp_path):
    (tmp_path / "compose.yml").write_text(COMPOSE.read_text().replace("depends_on:", "dependson:"))
    done = _check_compose(tmp_path / "compose.yml")
    assert done.returncode != 0
    assert "dependson" in done.stdout


@pytest.mark.parametrize("name", ["environment", "engine", "trainer"])
def test_a_service_gives_a_command_that_agentrl_has(name):
    _parse(_services()[name]["command"])


def test_what_services_mount_and_build_is_there():
    for name, service in _services().items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (COMPOSE.parent / source).exists(), f"{name}: {source}"
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()


def test_the_recipe_names_the_services():
    config = load_run_config(ROOT / "deploy" / "sql.toml", [])
    hosts = {"environment:8100", "engine:30000"}
    named = {*config.environments["sql"].servers, *config.policies["main"].engine.urls}
    assert {url.removeprefix("http://") for url in named} == hosts
    assert {host.split(":")[0] for host in hosts} <= set(_services())
    trainer = _services()["trainer"]["environment"]
    assert {config.environments["sql"].token_variable, config.policies["main"].engine.token_variable} <= set(trainer)


def test_core_resources_are_as_kubernetes_wants_them():
    core = [entry for entry in documents() if not entry["apiVersion"].startswith("ray.io/")]
    assert {entry["kind"] for entry in core} == {"PersistentVolumeClaim", "Service", "StatefulSet"}
    for entry in core:
        check_core(entry)


def test_a_field_that_kubernetes_does_not_have_is_refused():
    wrong = copy.deepcopy(next(entry for entry in documents() if entry["kind"] == "StatefulSet"))
    wrong["spec"]["template"]["spec"]["containers"][0]["commnd"] = ["agentrl"]
    with pytest.raises(kubernetes_validate.ValidationError, match="commnd"):
        check_core(wrong)


def test_the_cluster_has_what_ray_reads_in_it():
    groups = check_cluster(_cluster()["spec"])
    assert {name: found.get("GPU", 0) for name, found in groups.items()} == {
        "headgroup": 0, "trainer": 8, "engine": 8, "rollout": 0,
    }  # fmt: skip
    assert groups["headgroup"]["CPU"] == 4
    assert groups["engine"]["engine"] == 8
    assert groups["rollout"]["rollout"] == 16


def test_the_cluster_has_the_ray_that_agentrl_is_tested_with():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={_cluster()['spec']['rayVersion']}" in lines


def test_an_option_that_ray_start_does_not_have_is_refused():
    wrong = copy.deepcopy(_cluster()["spec"])
    wrong["headGroupSpec"]["rayStartParams"]["num-cpu"] = "1"
    with pytest.raises(AssertionError, match="num-cpu"):
        check_cluster(wrong)


def test_pods_run_images_of_ours_with_commands_that_agentrl_has():
    pods = [entry["spec"]["template"]["spec"] for entry in documents() if entry["kind"] == "StatefulSet"]
    spec = _cluster()["spec"]
    pods += [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    containers = [container for pod in pods for container in pod["containers"]]
    assert {container["image"] for container in containers} <= IMAGES
    for container in containers:
        if "args" in container:
            _parse(container["args"])


def test_a_schema_of_kuberay_refuses_what_it_does_not_name(tmp_path):
    group = {"type": "object", "required": ["replicas"], "properties": {"replicas": {"type": "integer"}}}
    spec = {"type": "object", "properties": {"group": group}}
    schema = {"type": "object", "properties": {"kind": {}, "apiVersion": {}, "metadata": {}, "spec": spec}}
    crd = {
        "group": "ray.io",
        "names": {"kind": "RayCluster"},
        "versions": [{"name": "v1", "schema": {"openAPIV3Schema": schema}}],
    }
    (tmp_path / "ray.io_rayclusters.yaml").write_text(yaml.safe_dump({"spec": crd}))
    resource = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "a"}, "spec": {"group": {}}}
    known = schemas(tmp_path)
    assert problems(resource, known) == ["$.spec.group: 'replicas' is a required property"]
    resource["spec"]["group"] = {"replicas": 1, "replica": 1}
    assert "'replica' was unexpected" in problems(resource, known)[0]
