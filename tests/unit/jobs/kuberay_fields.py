"""Fields of KubeRay's RayJob (ray.io/v1) that a manifest may use, as its API reference lists them, and their types.

Pods are left to Kubernetes' own schemas. ``...`` is a mapping of texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

POD = "PodTemplateSpec"
GROUP = {"rayStartParams": ..., "template": POD, "serviceType": str, "resources": ..., "labels": ...}
WORKERS = {
    "groupName": str,
    "replicas": int,
    "minReplicas": int,
    "maxReplicas": int,
    "numOfHosts": int,
    "suspend": bool,
}
CLUSTER = {
    "rayVersion": str,
    "suspend": bool,
    "enableInTreeAutoscaling": bool,
    "headGroupSpec": GROUP,
    "workerGroupSpecs": [{**WORKERS, **GROUP}],
}
RAY_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str, "labels": ..., "annotations": ...},
    "spec": {
        "activeDeadlineSeconds": int,
        "backoffLimit": int,
        "clusterSelector": ...,
        "entrypoint": str,
        "entrypointNumCpus": float,
        "entrypointNumGpus": float,
        "entrypointResources": str,
        "jobId": str,
        "metadata": ...,
        "rayClusterSpec": CLUSTER,
        "runtimeEnvYAML": str,
        "shutdownAfterJobFinishes": bool,
        "submissionMode": str,
        "submitterPodTemplate": POD,
        "suspend": bool,
        "ttlSecondsAfterFinished": int,
    },
}


def faults(value: Any, expected: Any = RAY_JOB, path: str = "") -> Iterator[str]:
    """What in a manifest is unknown there, or of another type; templates of pods are passed over."""
    if expected is POD:
        return
    if isinstance(expected, list):
        for index, entry in enumerate(value):
            yield from faults(entry, expected[0], f"{path}[{index}]")
    elif expected is ...:
        yield from (f"{path}.{key}" for key, text in value.items() if not isinstance(text, str))
    elif isinstance(expected, dict):
        for key, below in value.items():
            if key in expected:
                yield from faults(below, expected[key], f"{path}.{key}")
            else:
                yield f"{path}.{key} is unknown"
    elif type(value) is not expected:
        yield f"{path} is {value!r}"


def pods(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Templates of the pods by the name of their group; ``head`` is the head's."""
    cluster = job["spec"]["rayClusterSpec"]
    groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"], **groups}
