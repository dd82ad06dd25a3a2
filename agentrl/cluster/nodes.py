"""What the nodes of a cluster have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ray

# What Ray counts by itself on every node.
_COUNTED = ("memory", "object_store_memory")


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is up: its id, address, and what it has to give in all, by Ray's names of resources."""

    node_id: str
    host: str
    resources: Mapping[str, float]


def live_nodes() -> list[Node]:
    """Nodes of the cluster that this process has joined. Asks the head."""
    return [
        Node(found["NodeID"], found["NodeManagerAddress"], _given(found["Resources"]))
        for found in ray.nodes()
        if found["Alive"]
    ]


def own_host() -> str:
    """Address of the node that this process is on."""
    host: str = ray.util.get_node_ip_address()
    return host


def own_node() -> Node:
    """The node that this process is on, without what it has to give."""
    return Node(ray.get_runtime_context().get_node_id(), own_host(), {})


def free_nodes() -> list[Node]:
    """The live ones with what is not taken of each. Asks the head."""
    free = ray._private.state.available_resources_per_node()
    return [Node(node.node_id, node.host, _given(free.get(node.node_id, {}))) for node in live_nodes()]


def fits(share: Mapping[str, float], room: Mapping[str, float]) -> bool:
    """Whether there is room for a share."""
    return all(amount <= room.get(name, 0) for name, amount in share.items())


def describe(share: Mapping[str, float]) -> str:
    """Example: ``4 CPU, 1 GPU``; ``nothing``."""
    return ", ".join(f"{amount:g} {name}" for name, amount in share.items() if amount) or "nothing"


def _given(resources: Mapping[str, float]) -> dict[str, float]:
    """Without what Ray counts by itself, and what placement groups have made of it."""
    kept = {name: amount for name, amount in resources.items() if name not in _COUNTED}
    return {name: amount for name, amount in kept.items() if not name.startswith("node:") and "_group_" not in name}
