"""The table [job] of a recipe: how its run is submitted.

It is no part of what the run is: a job with another table goes on with the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from agentrl.config.base import ConfigModel, parse_config
from agentrl.config.loading import load_table

DASHBOARD = "http://127.0.0.1:8265"


def _absolute(folder: Path) -> Path:
    if not folder.is_absolute():
        raise ValueError(f"'{folder}' is no absolute path; give one such as /shared")
    return folder


class RayJobConfig(ConfigModel):
    """Jobs of a Ray cluster, by the job server of its head."""

    address: str | None = None
    """URL of the head's dashboard, such as http://head:8265; by default the variable RAY_API_SERVER_ADDRESS, or else
    this machine's."""


class SlurmConfig(ConfigModel):
    """Jobs of Slurm, by its own commands."""


class KubernetesConfig(ConfigModel):
    """RayJobs of KubeRay on Kubernetes, by kubectl and its current context."""

    image: str | None = None
    """Image of all pods, with agentrl[train,ray]; has to be given."""
    claim: str | None = None
    """PersistentVolumeClaim that all pods mount (ReadWriteMany): models and run folders are there. Has to be given."""
    folder: Annotated[Path, AfterValidator(_absolute)] = Path("/shared")
    """Where the claim is mounted, and where the run starts: relative paths of the recipe are relative to it."""
    namespace: str = "default"
    """Namespace of the job."""
    memory: str = "16Gi"
    """Memory of each pod, as Kubernetes writes it."""
    gpus_of_node: Annotated[int, Field(gt=0)] = 8
    """GPUs of a machine: trainer ranks share a pod up to that many."""
    retries: Annotated[int, Field(ge=0)] = 10
    """How often the job is started once more, on a cluster of its own, after it failed or was pre-empted."""
    secret: str | None = None
    """Secret whose entries become variables of all pods, such as the tokens that the recipe names."""
    priority_class: str | None = None
    """PriorityClass of the pods: who pre-empts whom."""


class JobConfig(ConfigModel):
    """How a run is submitted, to whichever system."""

    command: Annotated[tuple[str, ...], Field(min_length=1)] = ("agentrl",)
    """How agentrl is called where the job runs. Give the path if it is in an environment that is not active there."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables that the run gets. Not for secrets: job systems show and keep them."""
    grace_s: Annotated[int, Field(gt=0)] = 120
    """Seconds between a stop or a pre-emption and the kill, in which the run parks and checkpoints. Raise it for models
    whose checkpoint takes longer to write."""
    ray: RayJobConfig = RayJobConfig()
    """What `--to ray` needs to know."""
    slurm: SlurmConfig = SlurmConfig()
    """What `--to slurm` needs to know."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """What `--to kubernetes` needs to know."""


class _Recipe(ConfigModel):
    job: JobConfig = JobConfig()
    """The only table of a recipe that is looked at here."""


def load_job_config(recipe: Path, overrides: list[str]) -> JobConfig:
    """The table [job] of a recipe with overrides; all defaults if there is none. Raises ConfigError."""
    table = load_table(recipe, overrides)
    return parse_config(_Recipe, {"job": table.get("job", {})}, str(recipe), overrides).job
