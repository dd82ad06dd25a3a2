"""The section [runtime] of a recipe: on which machines a run's processes are. Imports no Ray."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from agentrl.config.base import ConfigModel
from agentrl.process.place import Role


class SharingConfig(ConfigModel):
    """What a run's processes have in common, wherever they are."""

    colocated: bool = False
    """Whether engines and trainer of a policy share devices: engines stand still while the trainer steps, and give back
    the memory of their KV caches."""


class LocalRuntimeConfig(SharingConfig):
    """All processes are on the machine of the run."""

    kind: Literal["local"] = "local"
    """Processes are children of the run."""
    max_resumes: Annotated[int, Field(ge=0)] = 0
    """How often in a row, without a step in between, the run goes on by itself from its last checkpoint and its journal
    once its trainer or the last engine of a policy is gone. 0 ends it with the reason, which on one machine is mostly
    too little memory."""


class MemberResources(ConfigModel):
    """What one member of a role takes of its node, as Ray counts it; Ray bounds how many fit, not what they use."""

    cpus: Annotated[float, Field(gt=0)] = 1.0
    """CPUs, in parts of one if there are more members than cores. Processes of torch use as many threads as this."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs, which alone the member sees; 0.5 lets two members share one."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Resources that nodes were given by name (`ray start --resources`), for members that belong on certain nodes."""


class RayRuntimeConfig(SharingConfig):
    """Processes are spread over the nodes of a Ray cluster."""

    kind: Literal["ray"]
    """Processes are children of actors."""
    address: str = "auto"
    """``auto`` joins the cluster that this machine is a node of, as a job that `ray job submit` started does;
    ``HOST:PORT`` that of this head; ``local`` starts one on this machine, which ends with the run."""
    engines: MemberResources = MemberResources()
    """What an engine takes. Give it its GPUs here."""
    trainer: MemberResources = MemberResources()
    """What a trainer rank takes. The ranks of a policy are started together, on as few nodes as have room."""
    workers: MemberResources = MemberResources()
    """What a rollout worker takes, with the environments that it starts."""
    evaluator: MemberResources = MemberResources()
    """What the worker takes that plays evaluations."""
    scorers: MemberResources = MemberResources()
    """What a worker takes that scores turns."""
    environments: MemberResources = MemberResources()
    """What a server takes of an environment that is placed ``served``."""
    elastic: bool = False
    """Start with one engine of each policy, one rollout worker, and all of the other roles; more engines and workers
    start as nodes join. Otherwise all that the recipe asks for has to be there before the run starts."""
    max_resumes: Annotated[int, Field(ge=0)] = 3
    """How often in a row, without a step in between, the run goes on by itself from its last checkpoint and its journal
    once its trainer or the last engine of a policy is gone."""
    wait_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that a member waits for room, and a run that goes on for nodes in place of those that it lost. Raise it
    where nodes take longer to be had."""

    @field_validator("address")
    @classmethod
    def _is_no_client(cls, value: str) -> str:
        if value.startswith("ray://"):
            raise ValueError(
                f"'{value}' is an address of Ray Client, which only passes calls on: start the run on a node of the "
                "cluster, by `ray job submit -- agentrl train RECIPE` for example, with runtime.address = 'auto'"
            )
        host, _, port = value.rpartition(":")
        if value not in ("auto", "local") and not (host and port.isdigit()):
            raise ValueError(f"'{value}' is neither auto nor local, and no HOST:PORT such as 10.0.0.1:6379")
        return value


def _of_a_kind(value: Any) -> Any:
    """A section without a kind is of this machine: it says something else of the run's processes."""
    return {"kind": "local", **value} if isinstance(value, dict) else value


RuntimeConfig = Annotated[
    LocalRuntimeConfig | RayRuntimeConfig, Field(discriminator="kind"), BeforeValidator(_of_a_kind)
]


def resources_of(config: RayRuntimeConfig, role: Role) -> dict[str, float]:
    """What a member of a role takes of its node, by Ray's names. Example: ``{"CPU": 1.0, "GPU": 0.5}``."""
    members = {
        Role.ENGINE: config.engines,
        Role.TRAINER: config.trainer,
        Role.WORKER: config.workers,
        Role.EVALUATOR: config.evaluator,
        Role.SCORER: config.scorers,
        Role.ENVIRONMENT: config.environments,
    }
    taken = members[role]
    gpus = {"GPU": taken.gpus} if taken.gpus else {}
    return {"CPU": taken.cpus, **gpus, **taken.resources}
