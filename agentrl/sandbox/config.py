"""Which sandboxes a run has, and how many."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from agentrl.config.base import ConfigModel


class SandboxConfig(ConfigModel):
    """The sandboxes of environments that need them."""

    kind: str = "bwrap"
    """Registered name of a backend, or ``module:attribute``: ``bwrap`` (Linux namespaces, no daemon), ``docker``
    (containers of one or several Docker engines), or ``local``, which isolates nothing, for tasks that you trust."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options that the backend declares, such as ``hosts`` of docker."""
    most: Annotated[int, Field(gt=0)] = 64
    """Sandboxes that may live at once; a further episode waits for one. Raise it with rollout.concurrency."""
    warm: Annotated[int, Field(ge=0)] = 4
    """Fresh sandboxes that are made ahead, in all. Worth more where making one is slow, as with docker."""
    open_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that an episode waits for a sandbox before it fails."""
    abandoned_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that the sandbox of an episode lives on after the process that used it is gone, for another one to go on
    in it."""
