"""What a server is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RETRY_AFTER_S = 1.0
"""When a client that was refused for want of room may ask again."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What sessions may use. `most` is their number on the whole server.

    A call may take `call_s`. A session ends once it was idle for `idle_s`, or is `session_s` old, behind the call that
    is under way.
    """

    most: int = 1000
    call_s: float = 60.0
    idle_s: float = 600.0
    session_s: float = 4 * 3600.0


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """A whole server. `environments` has the options of each, by name; `workers` is the number of its processes.

    Without a `token` anybody who reaches the port may use it. To stop, a server waits `drain_s` for its sessions.
    Environments that ask for sandboxes get those of the kind `sandbox`.

    Example: ``ServerOptions({"sql": {}}, "logs")``.
    """

    environments: Mapping[str, Mapping[str, Any]]
    logs: str
    token: str | None = None
    workers: int = 1
    limits: SessionLimits = field(default_factory=SessionLimits)
    drain_s: float = 60.0
    max_message_bytes: int = 16 * 2**20
    sandbox: str = "bwrap"


@dataclass(frozen=True, slots=True)
class PlacedServer:
    """What a run has served at a place, and that address, at which the server listens on a port of its choice."""

    options: ServerOptions
    host: str


@dataclass(frozen=True, slots=True)
class ServerReady:
    """Where such a server takes calls, or why it cannot."""

    url: str = ""
    error: str | None = None
