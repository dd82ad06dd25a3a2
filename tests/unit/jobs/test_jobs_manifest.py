from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import kubernetes_validate
import pytest
import yaml

from agentrl.cluster.config import resources_of
from agentrl.jobs.config import JobConfig, KubernetesConfig
from agentrl.jobs.kubernetes import KubernetesJobs
from agentrl.jobs.submission import build_job
from agentrl.orchestration.config import load_run_config
from agentrl.process.place import Role
from agentrl.types.errors import ConfigError
from tests.unit.jobs.kuberay_fields import faults, pods

CONFIG = KubernetesConfig(image="registry/agentrl:1", claim="runs", secret="tokens", priority_class="low", retries=4)
CLUSTER = [
    "runtime.engines={cpus=4, gpus=1}",
    "runtime.trainer={cpus=8, gpus=1}",
    "runtime.workers={cpus=0.5, resources={seat=2}}",
    "runtime.evaluator={gpus=0.5}",
    "runtime.elastic=true",
    "policies.main.engine={kind='embedded', count=5}",
    "policies.main.trainer.ranks=12",
    "rollout.workers=3",
]


@pytest.fixture
def manifest(recipe) -> list[dict]:
    system = KubernetesJobs(CONFIG)
    spec = build_job(recipe, CLUSTER, JobConfig(grace_s=50, environment={"A": "b"}), system)
    return list(yaml.safe_load_all(system.render(spec)))


def groups_of(job: dict) -> dict[str, dict]:
    return {group["groupName"]: group for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]}


def test_a_manifest_is_what_kubernetes_and_kuberay_take(manifest):
    job, recipe = manifest
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert list(faults(job)) == []
    kubernetes_validate.validate(recipe, "1.34", strict=True)
    for name, template in pods(job).items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, "1.34", strict=True)
    assert len(job["metadata"]["name"]) <= 47, "more than KubeRay takes"


def test_the_checks_of_a_manifest_find_faults(manifest):
    job, _ = manifest
    job["spec"]["backoffLimit"] = "4"
    job["spec"]["rayClusterSpec"]["workers"] = []
    assert sorted(faults(job)) == [".spec.backoffLimit is '4'", ".spec.rayClusterSpec.workers is unknown"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"container": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, "1.34", strict=True)


def test_each_role_has_pods_with_room_for_its_members(manifest):
    """By hand: 12 ranks of a GPU are 8 and 4 on nodes of 8; two evaluators would share a GPU."""
    groups = groups_of(manifest[0])
    sizes = {name: (g["minReplicas"], g["replicas"], g["maxReplicas"]) for name, g in groups.items()}
    assert sizes == {"engine": (2, 6, 6), "trainer": (2, 2, 2), "worker": (1, 3, 3), "evaluator": (1, 1, 1)}
    limits = {n: g["template"]["spec"]["containers"][0]["resources"]["limits"] for n, g in groups.items()}
    memory = {"memory": "16Gi"}
    assert limits == {
        "engine": {"cpu": "4", "nvidia.com/gpu": "1", **memory},
        "trainer": {"cpu": "64", "nvidia.com/gpu": "8", **memory},
        "worker": {"cpu": "1", **memory},
        "evaluator": {"cpu": "1", "nvidia.com/gpu": "1", **memory},
    }


def test_members_of_a_role_find_their_own_pods_and_no_others(manifest, recipe):
    """What the command's overrides ask of a node is what the nodes of that role, alone, give."""
    job, _ = manifest
    [words] = [shlex.split(shlex.split(job["spec"]["entrypoint"])[2])]
    overrides = [word for word in words if "=" in word and not word.startswith("--")]
    runtime = load_run_config(recipe, overrides).runtime
    groups = groups_of(job)
    for role in (Role.ENGINE, Role.TRAINER, Role.WORKER, Role.EVALUATOR):
        asked = resources_of(runtime, role)
        fitting = [
            name
            for name, group in groups.items()
            if all(amount <= given_by(group).get(resource, 0) for resource, amount in asked.items())
        ]
        assert fitting == [str(role)]
    assert job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def given_by(group: dict) -> dict[str, float]:
    start = group["rayStartParams"]
    [named] = shlex.split(start["resources"])
    return {"CPU": float(start["num-cpus"]), "GPU": float(start["num-gpus"]), **json.loads(named)}


def test_pods_see_the_recipe_the_storage_and_the_secret(manifest, recipe):
    job, config_map = manifest
    assert config_map["data"]["recipe.toml"] == recipe.read_text()
    assert str(recipe) not in job["spec"]["entrypoint"]
    assert "/etc/agentrl/recipe.toml" in shlex.split(shlex.split(job["spec"]["entrypoint"])[2])
    for template in pods(job).values():
        [container] = template["spec"]["containers"]
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        sources = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert sources[mounted["/shared"]]["persistentVolumeClaim"] == {"claimName": "runs"}
        assert sources[mounted["/etc/agentrl"]]["configMap"] == {"name": config_map["metadata"]["name"]}
        assert container["envFrom"] == [{"secretRef": {"name": "tokens"}}]
        assert template["spec"]["priorityClassName"] == "low"
        assert template["spec"]["terminationGracePeriodSeconds"] > 50
    variables = json.loads(job["spec"]["runtimeEnvYAML"])["env_vars"]
    assert variables == {"A": "b", "RAY_JOB_STOP_WAIT_TIME_S": "50"}
    assert job["spec"]["backoffLimit"] == 4


def test_the_hook_of_the_heads_pod_ends_once_the_run_has_parked(manifest, tmp_path):
    """The shell lines of the manifest, as a pod would run them, around a run that takes a second to park."""
    job, _ = manifest
    parking = "import signal, time, sys; signal.signal(15, lambda *_: (time.sleep(1), sys.exit(130))); "
    parking += "open('up', 'w').close(); time.sleep(60)"
    folder, pid = shlex.quote(str(tmp_path)), str(tmp_path / "pid")
    line = (
        shlex.split(job["spec"]["entrypoint"])[2].replace("/tmp/agentrl-run.pid", pid).replace("/shared ", f"{folder} ")
    )
    start, run, _ = line.partition("exec ")
    run = subprocess.Popen(["sh", "-c", f"{start}{run}{shlex.join([sys.executable, '-c', parking])}"])
    until = time.monotonic() + 60
    while not (tmp_path / "up").exists():
        assert time.monotonic() < until
        assert run.poll() is None
        time.sleep(0.01)
    hook = pods(job)["head"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    # The run's parent has to take note of its end, or it is still there for `kill -0`.
    hooked = subprocess.Popen([word.replace("/tmp/agentrl-run.pid", pid) for word in hook], stderr=subprocess.PIPE)
    assert run.wait(60) == 130
    assert hooked.wait(60) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(run.pid, signal.SIGTERM)


@pytest.mark.parametrize("key", ["image", "claim"])
def test_what_a_manifest_cannot_do_without_has_to_be_given(recipe, key):
    system = KubernetesJobs(CONFIG.model_copy(update={key: None}))
    spec = build_job(recipe, [], JobConfig(), system)
    with pytest.raises(ConfigError, match=f"job.kubernetes.{key} is missing"):
        system.render(spec)


def test_the_folder_of_the_claim_is_an_absolute_path():
    with pytest.raises(ValueError, match="'runs' is no absolute path"):
        KubernetesConfig(folder="runs")
