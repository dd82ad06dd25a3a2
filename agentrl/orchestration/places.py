"""Chooses where a run's processes are, and whether there is room for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from agentrl.cluster.config import LocalRuntimeConfig, RayRuntimeConfig
from agentrl.inference.config import AttachedEngineConfig
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.served import TOKEN_VARIABLE
from agentrl.orchestration.worker_assembly import num_processes
from agentrl.process.local_place import LocalPlaces
from agentrl.process.place import Places, Role
from agentrl.scorers.config import find_definition
from agentrl.types.errors import ConfigError

_NO_RAY = "runtime.kind = 'ray' needs the extra 'ray': pip install 'agentrl[ray]', on all nodes"


async def build_places(config: RunConfig) -> Places:
    """The places of a run: this machine, or the nodes of a cluster, which it joins. Raises ConfigError."""
    if isinstance(config.runtime, LocalRuntimeConfig):
        return LocalPlaces()
    try:
        from agentrl.cluster.places import RayPlaces
    except ModuleNotFoundError as error:
        raise ConfigError(_NO_RAY) from error
    named = _named_variables(config.model_dump(mode="json"))
    return RayPlaces.open(config.runtime, named | {TOKEN_VARIABLE})


def plays_elsewhere(config: RunConfig) -> bool:
    """Whether nothing is played on this machine, unless it is a node of the cluster."""
    return not isinstance(config.runtime, LocalRuntimeConfig) and num_processes(config) > 0


async def check_places(
    config: RunConfig, folder: Path, members: Mapping[Role, int], on_wait: Callable[[str], None] | None = None
) -> None:
    """Whether the cluster that was joined has what `members` of each role ask for, and its nodes see the run's folder.

    With `on_wait`, which is told what is missing, it may come to have it within `runtime.wait_s`.

    Waits for: answers of the nodes, and for nodes. Unblocked by: them, deadlines.

    Raises:
        ConfigError: not so; says what is asked for and what is there.
    """
    if isinstance(config.runtime, LocalRuntimeConfig):
        return
    from agentrl.cluster.checks import check_nodes, check_resources, wait_for_resources

    await check_nodes(folder)
    if on_wait is None:
        check_resources(config.runtime, members)
    elif await wait_for_resources(config.runtime, members, on_wait):
        await check_nodes(folder)


def members_of(config: RunConfig) -> Mapping[Role, int]:
    """Processes of each role that a run cannot begin without; of some it has more later.

    An elastic run begins with one engine of each policy and one worker.
    """
    runtime = config.runtime
    is_elastic = isinstance(runtime, RayRuntimeConfig) and runtime.elastic
    engines = [policy.engine for policy in config.policies.values()]
    counts = [engine.count for engine in engines if not isinstance(engine, AttachedEngineConfig)]
    is_evaluated = any(map(config.is_evaluated, config.trained))
    processes = num_processes(config)
    return {
        Role.ENGINE: (len(counts) if is_elastic else sum(counts)) + (len(config.acting) if is_evaluated else 0),
        Role.TRAINER: sum(config.policies[name].trainer.ranks for name in config.trained),
        Role.WORKER: min(processes, 1) if is_elastic else processes,
        Role.EVALUATOR: int(is_evaluated and processes > 0),
        Role.ENVIRONMENT: sum(s.num_servers for s in config.environments.values() if s.placement == "served"),
        Role.SCORER: sum(find_definition(scorer.kind).computes for scorer in config.turn_scorers()),
    }


def evaluators_of(config: RunConfig) -> Mapping[Role, int]:
    """Processes of each role that an evaluation has by itself."""
    servers = members_of(config)[Role.ENVIRONMENT]
    return {Role.ENGINE: len(config.acting), Role.EVALUATOR: int(num_processes(config) > 0), Role.ENVIRONMENT: servers}


def _named_variables(settings: object) -> frozenset[str]:
    """Environment variables that a configuration names, such as those with tokens."""
    if isinstance(settings, list):
        return frozenset[str]().union(*map(_named_variables, settings))
    if not isinstance(settings, dict):
        return frozenset()
    named = {value for key, value in settings.items() if key.endswith("_variable") and isinstance(value, str)}
    return frozenset(named).union(*map(_named_variables, settings.values()))
