"""Where agentrl keeps what can be made again: verdicts on models, virtual environments."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """``$XDG_CACHE_HOME/agentrl``, by default in ``~/.cache``; it need not be there. None if this user has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl"
    except RuntimeError:
        return None
