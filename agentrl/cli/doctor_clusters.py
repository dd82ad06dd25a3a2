"""What `agentrl doctor` says of clusters: Ray and whether one is reached, Slurm, Kubernetes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata

from agentrl.cli.extras import missing_packages, remedy

_ASK_S = 20.0
_COMMANDS = {
    "Slurm": ("sbatch", ("--version",), "install Slurm's client commands where jobs are to be submitted"),
    "Kubernetes": ("kubectl", ("version", "--client"), "install kubectl where jobs are to be submitted"),
}


def check_clusters(address: str | None) -> Iterator[tuple[bool, str]]:
    """Whether the commands of each kind of cluster are here; without them, and without Ray, local runs go all the same.

    With an `address` of a Ray cluster that one must answer.
    """
    yield from _ray(address)
    for kind, (command, arguments, advice) in _COMMANDS.items():
        if (path := shutil.which(command)) is None:
            yield True, f"no {kind}: {command} is not on PATH; {advice}"
        else:
            yield True, _answer(kind, path, arguments)


def _ray(address: str | None) -> Iterator[tuple[bool, str]]:
    if missing_packages("ray"):
        yield address is None, f"no Ray; {remedy('ray')}"
        return
    yield True, f"ray {metadata.version('ray')}"
    if address is None:
        return
    from agentrl.cluster.config import RayRuntimeConfig
    from agentrl.cluster.joining import join, leave
    from agentrl.cluster.nodes import describe, live_nodes
    from agentrl.types.errors import ConfigError

    try:
        join(RayRuntimeConfig(kind="ray", address=address))
    except ConfigError as error:
        yield False, str(error)
        return
    try:
        nodes = live_nodes()
        yield True, f"the Ray cluster at {address} answers and has {len(nodes)} nodes"
        for node in nodes:
            yield True, f"node {node.host}: {describe(node.resources)}"
    finally:
        leave()


def _answer(kind: str, path: str, arguments: tuple[str, ...]) -> str:
    """What a command says of its version; one that fails reaches no cluster, which is no fault of this machine."""
    try:
        asked = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no {kind}: {path} gives no answer: {error}"
    said = (asked.stdout or asked.stderr).strip().splitlines()
    first = said[0] if said else f"exit code {asked.returncode}"
    return f"{kind if asked.returncode == 0 else f'no {kind}'}: {path}, {first}"
