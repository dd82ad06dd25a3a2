"""Manifests held against what Kubernetes and Ray say themselves.

Pod templates are checked by Kubernetes' own schemas, a cluster by the reader that Ray's autoscaler has of it, and what
its groups start by the options of `ray start`. The rest is KubeRay's: `make test-crds` has its schemas from a checkout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSION = "1.37"


def documents() -> list[dict[str, Any]]:
    """All of deploy/kubernetes."""
    return [entry for path in sorted(FOLDER.glob("*.yaml")) for entry in yaml.safe_load_all(path.read_text())]


def pod_templates(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Those of a RayCluster's spec, as resources of Kubernetes."""
    for group in (spec["headGroupSpec"], *spec.get("workerGroupSpecs", ())):
        yield {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "group"}, "template": group["template"]}


def check_core(resource: dict[str, Any]) -> None:
    """Raises kubernetes_validate.ValidationError; unknown fields are errors too."""
    kubernetes_validate.validate(resource, VERSION, strict=True)


def check_cluster(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A RayCluster's spec by Kubernetes and Ray: what each group has, by Ray's names of resources.

    Raises:
        kubernetes_validate.ValidationError: a pod template is none.
        AssertionError: `ray start` has not such an option.
    """
    import ray.scripts.scripts
    from ray.autoscaler._private.kuberay import autoscaling_config

    for template in pod_templates(spec):
        check_core(template)
    options = {name.lstrip("-") for option in ray.scripts.scripts.start.params for name in option.opts}
    for group in (spec["headGroupSpec"], *spec.get("workerGroupSpecs", ())):
        unknown = set(group.get("rayStartParams", {})) - options
        assert not unknown, f"ray start has no {unknown}"
    read = autoscaling_config._derive_autoscaling_config_from_ray_cr(
        {"metadata": {"name": "tested", "namespace": "default"}, "spec": spec}
    )
    return {name: group["resources"] for name, group in read["available_node_types"].items()}
