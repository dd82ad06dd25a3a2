"""Makes a job of a recipe, after everything that can be known to fail has been looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl.cluster.config import LocalRuntimeConfig, RayRuntimeConfig, resources_of
from agentrl.inference.config import AttachedEngineConfig, EmbeddedEngineConfig, SGLangEngineConfig
from agentrl.jobs.config import JobConfig
from agentrl.jobs.job import Job, JobSpec, JobSystem, Members
from agentrl.journal.claim import holder_of
from agentrl.orchestration.config import PolicyConfig, RunConfig, load_run_config
from agentrl.orchestration.going_on import begun_run
from agentrl.orchestration.places import members_of
from agentrl.orchestration.preflight import check_models, check_players
from agentrl.orchestration.run_directory import RunDirectory, RunStatus
from agentrl.orchestration.runtime_checks import check_colocated, check_several_hosts
from agentrl.process.place import Role
from agentrl.types.errors import JobError


def build_job(recipe: Path, overrides: Sequence[str], job: JobConfig, system: JobSystem) -> JobSpec:
    """What is submitted for a recipe.

    Raises:
        ConfigError: the recipe is not sound, or the system lacks something that it needs; nothing is submitted.
        JobError: the run has come to its end, or runs already.
    """
    laid = [override for override in overrides if not _is_of_job(override)] + list(system.overrides)
    config = load_run_config(recipe, laid)
    _check(config, is_seen_here=system.working_folder is None)
    if system.working_folder is None:
        _check_folder(config)
    folder = system.working_folder or Path.cwd()
    name = RunDirectory.name_of(config)
    return JobSpec(
        run=name,
        run_folder=folder / config.runs_folder / name,
        recipe=recipe.absolute(),
        argv=(*job.command, "train", str(recipe.absolute()), *laid, "--resume"),
        working_folder=folder,
        environment=job.environment,
        members=tuple(_members(config)),
        grace_s=job.grace_s,
    )


def submit_job(system: JobSystem, spec: JobSpec) -> Job:
    """Submit it, unless a job of the same run is queued or runs; gives the job as the system has it then.

    Raises:
        JobError: there is such a job, or the system refuses.
    """
    for other in system.jobs():
        if other.mark.run_folder == spec.run_folder and not other.state.is_over:
            raise JobError(
                f"{spec.run_folder} has a job already, {other.id}, which is {other.state}: `agentrl jobs stop "
                f"{other.id}` parks it, and then another may go on with the run; or give this one another name or seed"
            )
    return system.find(system.submit(spec))


def _is_of_job(override: str) -> bool:
    return override.partition("=")[0].strip().partition(".")[0] == "job"


def _check(config: RunConfig, is_seen_here: bool) -> None:
    """What shows on a machine that need not have the job's devices. Raises ConfigError."""
    check_players(config)
    check_colocated(config)
    if not isinstance(config.runtime, LocalRuntimeConfig):
        check_several_hosts(config)
    if is_seen_here:
        check_models(config, {name: policy.model for name, policy in config.policies.items()})


def _check_folder(config: RunConfig) -> None:
    """Whether the run may go on, or begin. Raises ConfigError if it has begun otherwise, JobError if not."""
    run = begun_run(config)
    if run is None:
        return
    state, holder = run.state(), holder_of(run.journal)
    if state is not None and state.status is RunStatus.FINISHED:
        raise JobError(
            f"{run.path} has finished at version {state.version}, so there is nothing to submit; give the next run "
            "another name or seed"
        )
    if holder is not None and holder.is_alive:
        raise JobError(
            f"{run.path} is in use by process {holder.pid} on this machine; stop that run first (SIGTERM parks its "
            "episodes), or give this one another name or seed"
        )


def _members(config: RunConfig) -> Iterator[Members]:
    """What the run starts, role by role."""
    runtime = config.runtime
    least = members_of(config)
    if not isinstance(runtime, RayRuntimeConfig):
        devices = _gpus_of_local(config)
        for role, count in least.items():
            if count:
                yield Members(role, count, count, gpus=devices.get(role, 0) / count)
        return
    whole = config.model_copy(update={"runtime": runtime.model_copy(update={"elastic": False})})
    for role, count in members_of(whole).items():
        share = dict(resources_of(runtime, role))
        cpus, gpus = share.pop("CPU"), share.pop("GPU", 0.0)
        if count:
            yield Members(role, count, min(count, least[role]), cpus, gpus, share)


def _gpus_of_local(config: RunConfig) -> dict[Role, int]:
    """GPUs of engines and trainer ranks, of which a recipe for one machine says by name what they use."""
    engines = sum(_gpus_of_engines(policy) for policy in config.policies.values())
    ranks = sum(config.policies[n].trainer.ranks for n in config.trained if config.policies[n].trainer.device == "cuda")
    return {Role.ENGINE: engines, Role.TRAINER: ranks}


def _gpus_of_engines(policy: PolicyConfig) -> int:
    match policy.engine:
        case SGLangEngineConfig(devices=devices) if devices:
            return len({device for group in devices for device in group.split(",") if device})
        case SGLangEngineConfig(count=count, args=args):
            return count * int(args.get("tp-size", args.get("tp_size", 1)))
        case EmbeddedEngineConfig(count=count, args=args):
            return count if str(args.get("device", "cpu")).startswith("cuda") else 0
        case AttachedEngineConfig():
            return 0
