"""``python -m tests.deploy.crds FOLDER``: manifests against KubeRay's own schemas, of a checkout of KubeRay.

FOLDER is its helm-chart/kuberay-operator/crds. An unknown field is an error, as with `kubectl apply --validate=strict`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.deploy.kuberay import documents


def schemas(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Schemas by version and kind. Example of a key: ``("ray.io/v1", "RayCluster")``."""
    found = {}
    for path in folder.glob("ray.io_*.yaml"):
        spec = yaml.safe_load(path.read_text())["spec"]
        for version in spec["versions"]:
            schema = _strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return found


def problems(resource: dict[str, Any], known: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """What is wrong with a resource, each with its place."""
    validator = jsonschema.Draft202012Validator(known[resource["apiVersion"], resource["kind"]])
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(resource)]


def _strict(schema: Any) -> Any:
    """A schema in which objects have no other fields than those that are named, and quantities are numbers or text."""
    if isinstance(schema, list):
        return [_strict(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        strict["type"] = ["integer", "string"]
    return strict


def main(folder: Path) -> int:
    """The exit status: 1 if something is wrong, or there is nothing to check."""
    known = schemas(folder)
    checked = [resource for resource in documents() if (resource["apiVersion"], resource["kind"]) in known]
    wrong = [problem for resource in checked for problem in problems(resource, known)]
    print("\n".join(wrong) or f"{len(checked)} resources are as KubeRay wants them")
    return 1 if wrong or not checked else 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or not list(Path(sys.argv[1]).glob("ray.io_*.yaml")):
        sys.exit("give the folder with KubeRay's ray.io_*.yaml, such as kuberay/helm-chart/kuberay-operator/crds")
    sys.exit(main(Path(sys.argv[1])))
