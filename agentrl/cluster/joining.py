"""Makes this process a driver of a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import RayError

from agentrl.cluster.config import RayRuntimeConfig
from agentrl.cluster.nodes import live_nodes
from agentrl.process.place import PlacesLostError
from agentrl.process.threads import run_in_thread
from agentrl.types.errors import ConfigError

_REACH_S = 10.0
_LOOK_S = 2.0
_HEAD_S = 30.0
"""Seconds that the head may be silent, as while it is started anew. Ray ends the process after a minute."""
_AGAIN = "the run by the same command with --resume"
# This thread of Ray's fails if it is still about to subscribe when everything ends, which is of no interest to anybody.
_LISTENER = "ray_listen_error_messages"


def join(config: RayRuntimeConfig) -> bool:
    """Join the cluster, or start one; False if this process is a driver already. Takes seconds, on the main thread.

    Raises:
        ConfigError: there is no cluster at the address, or it is none that this process can join.
    """
    if ray.is_initialized():
        return False
    address = config.address
    _check_reachable(address)
    # Ray's advice on clusters goes to whoever starts one; what fails is told by what it raises.
    logging.getLogger("ray").setLevel(logging.ERROR)
    alone = {"include_dashboard": False} if address == "local" else {}
    with _signals_kept():
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False, **alone)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            leave()
            raise ConfigError(_explain(address, error)) from error
    return True


def leave() -> None:
    """End what this process has in the cluster, and a cluster that it started."""
    hook = threading.excepthook

    def tell(failed: threading.ExceptHookArgs) -> None:
        if failed.thread is None or failed.thread.name != _LISTENER:
            hook(failed)

    threading.excepthook = tell
    try:
        ray.shutdown()
    finally:
        threading.excepthook = hook


async def watch_cluster() -> None:
    """Waits for: the end of the cluster's head, or of this machine's node. Unblocked by: either, or cancellation.

    Raises:
        PlacesLostError: without either Ray starts nothing any more, and ends what it has started.
    """
    context = ray.get_runtime_context()
    address, own = context.gcs_address, context.get_node_id()
    loop = asyncio.get_running_loop()
    answered = loop.time()
    while loop.time() - answered < _HEAD_S:
        await asyncio.sleep(_LOOK_S)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_REACH_S):
                ids = await _ids_of_nodes(address)
            answered = loop.time()
            if own not in ids:
                raise PlacesLostError(
                    f"this machine's node of the Ray cluster at {address} has ended, and with it all that the run had "
                    f"started: start it by `ray start --address={address}`, then {_AGAIN}"
                )
    raise PlacesLostError(
        f"the head of the Ray cluster at {address} has not answered for {_HEAD_S:.0f} s: start it and its nodes, then "
        f"{_AGAIN}"
    )


async def _ids_of_nodes(address: str) -> set[str]:
    """Nodes that are up. Ray's own question waits as long as the head is gone, so that it is asked only if it answers.

    Waits for: the head. Raises OSError.
    """
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()
    return {node.node_id for node in await run_in_thread("nodes", live_nodes)}


def _check_reachable(address: str) -> None:
    """Ray itself would try for a minute. Waits for: a connection. Unblocked by: it, a deadline."""
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACH_S).close()
    except OSError as error:
        raise ConfigError(_explain(address, error)) from error


def _explain(address: str, error: Exception) -> str:
    """What Ray says in its first line, and what to do."""
    words = str(error).strip().splitlines() or [type(error).__name__]
    return (
        f"no Ray cluster can be joined at runtime.address = '{address}' ({words[0]}): start its head by "
        "`ray start --head`, this machine's node by `ray start --address=HOST:PORT`, with the same versions of Python "
        "and Ray, or let the run start a cluster of its own on this machine with runtime.address = 'local'"
    )


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself, and the run has its own use for it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
