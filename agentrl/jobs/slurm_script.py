"""The batch script of a run: options of sbatch, what is particular to the run, and what all of them do (`scripts`)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from agentrl.jobs.config import SlurmConfig
from agentrl.jobs.job import JobSpec
from agentrl.process.stopping import STOPPED
from agentrl.types.errors import ConfigError


def script_of(spec: JobSpec, config: SlurmConfig) -> str:
    """What sbatch gets. Raises ConfigError if the job could never run as it is asked for."""
    if config.time_limit_minutes and config.time_limit_minutes * 60 <= spec.grace_s + 60:
        raise ConfigError(
            f"job.slurm.time_limit_minutes {config.time_limit_minutes} leaves no time before the run parks, a "
            f"minute and job.grace_s {spec.grace_s} s ahead of it: raise the first or lower the second"
        )
    parts = ["\n".join(["#!/bin/bash", *(f"#SBATCH {shlex.quote(line)}" for line in _options(spec, config)), ""])]
    parts += ["\n".join([*_particulars(spec, config), ""])]
    parts += [resources.files("agentrl.jobs").joinpath("scripts", "slurm_run.sh").read_text()]
    return "\n".join(parts)


def cpus_of(spec: JobSpec, config: SlurmConfig) -> int:
    """CPUs that a job asks for, all on one node."""
    return config.cpus or spec.cpus


def log_of(run_folder: Path, number: str) -> Path:
    """Where a job writes: beside the run's folder, which the run itself makes."""
    return run_folder.with_name(f"{run_folder.name}.slurm-{number}.log")


def _options(spec: JobSpec, config: SlurmConfig) -> Iterator[str]:
    yield f"--job-name=agentrl-{spec.run}"
    yield f"--comment={spec.mark.text()}"
    yield f"--output={log_of(spec.run_folder, '%j')}"
    yield "--open-mode=append"
    yield f"--signal=B:USR1@{spec.grace_s}"
    yield "--requeue" if config.requeue else "--no-requeue"
    if config.partition:
        yield f"--partition={config.partition}"
    yield "--nodes=1"
    yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={cpus_of(spec, config)}"
    if gpus := _gpus(spec, config):
        yield f"--gpus-per-node={gpus}"
    if config.time_limit_minutes:
        yield f"--time={config.time_limit_minutes}"
    yield from config.arguments


def _particulars(spec: JobSpec, config: SlurmConfig) -> Iterator[str]:
    yield from (f"export {name}={shlex.quote(value)}" for name, value in spec.environment.items())
    yield f"cd {shlex.quote(str(spec.working_folder))} || exit 1"
    yield f"command=({shlex.join(spec.argv)})"
    yield f"grace_s={spec.grace_s}"
    yield f"requeue={int(config.requeue)}"
    yield f"parked={STOPPED}"


def _gpus(spec: JobSpec, config: SlurmConfig) -> int:
    return spec.gpus if config.gpus is None else config.gpus
