"""How weights are published."""

from __future__ import annotations

from typing import Literal

from agentrl.config.base import ConfigModel


class PublishConfig(ConfigModel):
    """Publication of a policy's weights."""

    pause_mode: Literal["abort", "retract", "in_place"] = "abort"
    """What the pause does to requests in flight: sessions get them back and continue them; or the engine
    requeues them; or it freezes them and they go on with their old KV."""
    keep_versions: int = 2
    """Staged versions that stay on disk."""
