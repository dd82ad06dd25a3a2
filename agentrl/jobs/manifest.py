"""A job as KubeRay's RayJob: one Ray cluster for it, whose pods are the members' nodes, and the recipe as a ConfigMap.

What parks the run where its machine is taken away is a hook of the head's pod: it sends the run SIGTERM and waits for
its end. The run then ends with a status above 0, so that KubeRay starts the job once more, which goes on with the run.
"""

from __future__ import annotations

import json
import shlex
from math import ceil, floor
from typing import Any

from agentrl.jobs.config import KubernetesConfig
from agentrl.jobs.job import JobSpec, Members
from agentrl.process.place import Role
from agentrl.types.errors import ConfigError

MANAGED = {"app.kubernetes.io/managed-by": "agentrl"}
"""Label of all that is ours."""
MARK = "agentrl.dev/mark"
"""Annotation with the job's mark."""
_RECIPE = "/etc/agentrl/recipe.toml"
_PID = "/tmp/agentrl-run.pid"
_GPU = "nvidia.com/gpu"
_HEAD_CPUS = 2
_END_S = 30
"""Seconds beyond the run's grace in which pods end."""
SECTIONS = {
    Role.ENGINE: "engines",
    Role.TRAINER: "trainer",
    Role.WORKER: "workers",
    Role.EVALUATOR: "evaluator",
    Role.SCORER: "scorers",
    Role.ENVIRONMENT: "environments",
}
"""Where [runtime] says what the members of a role take."""


def seat(role: Role) -> str:
    """The resource by which members of a role find their own pods: another's might be too small for who comes next."""
    return f"agentrl-{role}"


def ray_job(spec: JobSpec, config: KubernetesConfig, number: int) -> list[dict[str, Any]]:
    """The RayJob and the ConfigMap, as plain values.

    Raises:
        ConfigError: image or claim are not given.
    """
    for key, value in (("image", config.image), ("claim", config.claim)):
        if value is None:
            raise ConfigError(f"job.kubernetes.{key} is missing; give it in the recipe, or as job.kubernetes.{key}=...")
    name = spec.mark.job_name(number)
    metadata = {"namespace": config.namespace, "labels": MANAGED, "annotations": {MARK: spec.mark.text()}}
    groups = [_group(part, spec, config, name) for part in spec.members]
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, **metadata},
        "spec": {
            "entrypoint": _entrypoint(spec),
            "jobId": name,
            "runtimeEnvYAML": json.dumps(_runtime_env(spec)),
            "backoffLimit": config.retries,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {"headGroupSpec": _head(spec, config, name), "workerGroupSpecs": groups},
        },
    }
    recipe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, **metadata},
        "data": {"recipe.toml": spec.recipe.read_text()},
    }
    return [job, recipe]


def _entrypoint(spec: JobSpec) -> str:
    argv = [_RECIPE if word == str(spec.recipe) else word for word in spec.argv]
    # The number of the shell is that of the run, which takes its place.
    command = f"cd {shlex.quote(str(spec.working_folder))} && echo $$ > {_PID} && exec {shlex.join(argv)}"
    return f"sh -c {shlex.quote(command)}"


def _runtime_env(spec: JobSpec) -> dict[str, Any]:
    return {"env_vars": {**spec.environment, "RAY_JOB_STOP_WAIT_TIME_S": str(spec.grace_s)}}


def _head(spec: JobSpec, config: KubernetesConfig, name: str) -> dict[str, Any]:
    """The pod of the run itself. It has no CPUs for members."""
    pod = _pod("ray-head", spec, config, name, {"cpu": str(_HEAD_CPUS)})
    park = f"kill -TERM $(cat {_PID}) && while kill -0 $(cat {_PID}); do sleep 1; done"
    pod["spec"]["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": ["sh", "-c", park]}}}
    return {"rayStartParams": {"num-cpus": "0"}, "template": pod}


def _group(part: Members, spec: JobSpec, config: KubernetesConfig, name: str) -> dict[str, Any]:
    """The pods of a role."""
    fitting = _members_of_pod(part, config)
    cpus, gpus = ceil(fitting * part.cpus), ceil(fitting * part.gpus)
    named = {resource: fitting * amount for resource, amount in part.resources.items()}
    resources = {"cpu": str(cpus), **({_GPU: str(gpus)} if gpus else {})}
    least, most = (ceil(number / fitting) for number in (part.least, part.count))
    start = {
        "num-cpus": str(cpus),
        "num-gpus": str(gpus),
        # Ray's operator puts it on a command line, in a shell.
        "resources": f"'{json.dumps({**named, seat(part.role): fitting})}'",
    }
    return {
        "groupName": str(part.role),
        "replicas": most,
        "minReplicas": least,
        "maxReplicas": most,
        "rayStartParams": start,
        "template": _pod("ray-worker", spec, config, name, resources),
    }


def _members_of_pod(part: Members, config: KubernetesConfig) -> int:
    """How many share a pod: those that share a GPU, and the ranks of a trainer as far as a machine has GPUs."""
    if part.role is Role.TRAINER:
        return min(part.count, floor(config.gpus_of_node / part.gpus) if part.gpus else part.count) or 1
    return min(part.count, floor(1 / part.gpus)) if 0 < part.gpus < 1 else 1


def _pod(
    container: str, spec: JobSpec, config: KubernetesConfig, name: str, resources: dict[str, str]
) -> dict[str, Any]:
    taken = {**resources, "memory": config.memory}
    secret = {"envFrom": [{"secretRef": {"name": config.secret}}]} if config.secret else {}
    priority = {"priorityClassName": config.priority_class} if config.priority_class else {}
    return {
        "metadata": {"labels": MANAGED},
        "spec": {
            **priority,
            "terminationGracePeriodSeconds": spec.grace_s + _END_S,
            "containers": [
                {
                    "name": container,
                    "image": config.image,
                    **secret,
                    "resources": {"requests": taken, "limits": taken},
                    "volumeMounts": [
                        {"name": "shared", "mountPath": str(config.folder)},
                        {"name": "recipe", "mountPath": "/etc/agentrl", "readOnly": True},
                    ],
                }
            ],
            "volumes": [
                {"name": "shared", "persistentVolumeClaim": {"claimName": config.claim}},
                {"name": "recipe", "configMap": {"name": name}},
            ],
        },
    }
