"""What can be known of a cluster to fail a run, before anything is started there."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agentrl.cluster import probe as probe_module
from agentrl.cluster.config import RayRuntimeConfig, resources_of
from agentrl.cluster.nodes import Node, describe, fits, live_nodes
from agentrl.cluster.probe import Facts, probe
from agentrl.process.place import Role
from agentrl.process.threads import run_in_thread
from agentrl.types.errors import ConfigError

_PROBE_S = 120.0
_LOOK_S = 2.0
_LEAST_FREE_BYTES = 500_000_000
_VERSIONS = ("Python", "Ray", "agentrl")


def check_resources(config: RayRuntimeConfig, members: Mapping[Role, int], nodes: list[Node] | None = None) -> None:
    """Whether the cluster has what `members` of each role, without which the run cannot begin, take together.

    Raises:
        ConfigError: it has not; says what is asked for, and what is there.
    """
    nodes = live_nodes() if nodes is None else nodes
    there = "; ".join(f"{node.host}: {describe(node.resources)}" for node in nodes)
    needed: dict[str, float] = {}
    for role, number in members.items():
        share = resources_of(config, role)
        if number and not any(fits(share, node.resources) for node in nodes):
            raise ConfigError(
                f"no node of the cluster has what a member of runtime role '{role}' asks for, {describe(share)}. There "
                f"is {there}. Add a node that has it, or ask for less in [runtime]"
            )
        for name, amount in share.items():
            needed[name] = needed.get(name, 0) + number * amount
    if not fits(needed, _total(nodes)):
        asked = ", ".join(
            f"{number} x {role} of {describe(resources_of(config, role))}" for role, number in members.items() if number
        )
        remedy = "Add nodes, or ask for less in [runtime]"
        if not config.elastic:
            remedy += (
                ", or set runtime.elastic = true, which starts with one engine of each policy and one worker and adds "
                "the others as nodes join"
            )
        raise ConfigError(
            f"the recipe asks for more than the cluster has: {asked}, which is {describe(needed)} in all; there is "
            f"{there}. {remedy}"
        )


async def wait_for_resources(
    config: RayRuntimeConfig, members: Mapping[Role, int], on_wait: Callable[[str], None]
) -> bool:
    """Wait until `check_resources` passes, and say first what is missing; True if it did not pass at once.

    Waits for: nodes that join. Unblocked by: them, or `wait_s`.

    Raises:
        ConfigError: as `check_resources`, after `wait_s`.
    """
    loop = asyncio.get_running_loop()
    until, has_waited = loop.time() + config.wait_s, False
    while True:
        try:
            check_resources(config, members, await run_in_thread("nodes", live_nodes))
            return has_waited
        except ConfigError as missing:
            if loop.time() > until:
                raise
            if not has_waited:
                on_wait(f"waiting up to {config.wait_s:.0f} s for nodes: {missing}")
        has_waited = True
        await asyncio.sleep(_LOOK_S)


async def check_nodes(folder: Path) -> None:
    """Whether each node that gives resources has this program and sees `folder`, with room on its disks.

    Behind it `live_nodes` has no node that had ended before.

    Waits for: an answer of each. Unblocked by: it, a deadline.

    Raises:
        ConfigError: one has not; names it, and what to do.
    """
    token, word = folder / f".seen-by-nodes-{secrets.token_hex(8)}", secrets.token_hex(16)
    nodes = [node for node in live_nodes() if node.resources]
    ray.cloudpickle.register_pickle_by_value(probe_module)
    await asyncio.to_thread(token.write_text, word)
    try:
        found = await asyncio.gather(*(_ask(node, token, folder) for node in nodes))
    finally:
        ray.cloudpickle.unregister_pickle_by_value(probe_module)
        await asyncio.to_thread(token.unlink)
    here = probe(str(token), str(folder))
    for node, facts in zip(nodes, found, strict=True):
        for complaint in complaints(facts, here, word, folder) if facts else ():
            raise ConfigError(f"node {node.host} {complaint}")


def complaints(facts: Facts, here: Facts, word: str, folder: Path) -> Iterator[str]:
    """What is wrong with a node that gave these facts, where this machine gives those; each with its remedy."""
    for name in _VERSIONS:
        if not facts[name]:
            yield f"has no {name}: install {name} {here[name]} there, as on this machine"
        elif facts[name] != here[name]:
            yield f"has {name} {facts[name]}, and this machine {here[name]}: install the same on all nodes"
    if facts["token"] != word:
        yield (
            f"does not see the run folder {folder}: set runs_folder to a path that is the same shared storage on all "
            "nodes"
        )
    for name, place in (("folder", f"the run folder {folder}"), ("temporary", "its temporary files")):
        free = int(facts[name])
        if facts["token"] == word and free < _LEAST_FREE_BYTES:
            yield (
                f"has {free / 1e6:.0f} MB left for {place}, and a run needs {_LEAST_FREE_BYTES / 1e6:.0f} MB: free "
                "space there"
            )


async def _ask(node: Node, token: Path, folder: Path) -> Facts | None:
    """Facts of a node; None if it has ended: the head hears of that some seconds later, and then so does this.

    Waits for: them. Unblocked by: them, a deadline. Raises ConfigError.
    """
    try:
        task = ray.remote(probe).options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        )
        async with asyncio.timeout(_PROBE_S):
            return cast(Facts, await task.remote(str(token), str(folder)))
    except (RayError, TimeoutError) as error:
        if node.node_id not in {other.node_id for other in live_nodes()}:
            return None
        words = str(error).strip().splitlines() or [f"no answer in {_PROBE_S:.0f} s"]
        raise ConfigError(f"node {node.host} cannot run anything ({words[-1]}): restart it, or remove it") from error


def _total(nodes: list[Node]) -> dict[str, float]:
    total: dict[str, float] = {}
    for node in nodes:
        for name, amount in node.resources.items():
            total[name] = total.get(name, 0) + amount
    return total
