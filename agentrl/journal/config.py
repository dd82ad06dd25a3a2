"""What a run keeps of its episodes, and how durably."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.base import ConfigModel


class JournalConfig(ConfigModel):
    """The write-ahead journal of a run."""

    kind: Literal["segments", "none"] = "segments"
    """``segments`` makes every turn durable before it acts, so that a killed run goes on without losing one;
    ``none`` keeps nothing between checkpoints, for experiments that are thrown away."""
    keep_bytes: Annotated[int, Field(gt=0)] = 16 * 2**30
    """Bytes that consumed episodes may take in ``episodes/*.parquet``; beyond, the oldest files are deleted. Raise it
    to analyse or replay more of a long run."""
    gather_s: Annotated[float, Field(ge=0)] = 0.005
    """Seconds after a sync in which further entries gather for the next one; a turn may wait that much longer. Raise it
    where rollouts, engine and trainer share few processors: fewer syncs take less of these."""
