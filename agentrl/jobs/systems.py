"""Which job systems there are. Each is imported when it is asked."""

from __future__ import annotations

from enum import StrEnum

from agentrl.jobs.config import JobConfig
from agentrl.jobs.job import JobSystem
from agentrl.types.errors import JobError


class SystemName(StrEnum):
    """Systems by the names that commands and job ids have for them."""

    RAY = "ray"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"


def open_system(name: SystemName, config: JobConfig) -> JobSystem:
    """A job system, as `config` says how to reach it; asks nobody yet. Raises JobError if an extra is missing."""
    match name:
        case SystemName.RAY:
            try:
                from agentrl.jobs.ray_jobs import RayJobs
            except ModuleNotFoundError as error:
                raise JobError("jobs of Ray need the extra 'ray': pip install 'agentrl[ray]'") from error
            return RayJobs(config.ray)
        case SystemName.SLURM:
            from agentrl.jobs.slurm import SlurmJobs

            return SlurmJobs(config.slurm)
        case SystemName.KUBERNETES:
            try:
                from agentrl.jobs.kubernetes import KubernetesJobs
            except ModuleNotFoundError as error:  # PyYAML, which transformers brings
                raise JobError("jobs of Kubernetes need the extra 'train': pip install 'agentrl[train]'") from error
            return KubernetesJobs(config.kubernetes)
