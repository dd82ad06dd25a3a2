"""Makes this process a driver of a Ray cluster."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import RayError

from agentrl.cluster.config import RayRuntimeConfig
from agentrl.types.errors import ConfigError

_REACH_S = 10.0
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
