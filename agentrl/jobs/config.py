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


_SET_BY_US = ("--comment", "--job-name", "--output", "--open-mode", "--signal", "--requeue", "--no-requeue", "--wrap")


def _not_ours(arguments: tuple[str, ...]) -> tuple[str, ...]:
    for argument in arguments:
        if not argument.startswith("--") or "\n" in argument:
            raise ValueError(f"'{argument}' is no option of sbatch; give one such as --account=physics")
        if argument.partition("=")[0] in _SET_BY_US:
            raise ValueError(
                f"'{argument}' is what agentrl sets itself, to find its jobs and to park them; leave it out"
            )
    return arguments


class SlurmConfig(ConfigModel):
    """Jobs of Slurm, by its own commands: sbatch, squeue, scancel and scontrol."""

    partition: str | None = None
    """Partition; by default the cluster's."""
    cpus: Annotated[int, Field(gt=0)] | None = None
    """CPUs of the job, which has one node; by default what the recipe's processes take."""
    gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs of the job; by default what the recipe's processes take."""
    time_limit_minutes: Annotated[int, Field(gt=0)] | None = None
    """Time limit; by default the partition's. The run parks `job.grace_s` before it."""
    requeue: bool = True
    """Whether the job queues again by itself, until the run has made its steps, when it was pre-empted, its time limit
    came or a node failed. Without it the run is parked then, and somebody has to submit it again."""
    arguments: Annotated[tuple[str, ...], AfterValidator(_not_ours)] = ()
    """Further options of sbatch, such as ``--account=physics``, each as it would stand on the command line."""


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
