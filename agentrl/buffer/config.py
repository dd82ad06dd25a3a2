"""How many episodes make a step, and how stale a token may be."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.base import ConfigModel


class BufferConfig(ConfigModel):
    """The episode buffer of a run."""

    group_size: Annotated[int, Field(gt=0)] = 8
    """Episodes of one task; their mean reward is the baseline. 1 has no baseline."""
    groups_per_step: Annotated[int, Field(gt=0)] = 8
    """Groups that make one optimizer step."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """Optimizer steps between the weights that sampled a token and those that train on it. 0 generates
    and trains in turn, reproducibly; 2 to 8 keep both busy."""
    staleness: Literal["mask_spans", "wait", "withhold"] = "mask_spans"
    """What becomes of older tokens: they are masked; or the step waits for episodes about to expire
    (unbiased, slower); or the whole episode is left out and only its reward counts in the group."""
    group_filter: Literal["none", "spread"] = "none"
    """``spread`` drops groups whose rewards do not differ and samples others in their place."""
    max_filtered_groups: Annotated[int, Field(gt=0)] = 200
    """Groups that the filter may drop in a row before the run stops: nothing is left to learn."""
    stall_s: Annotated[float, Field(gt=0)] = 900.0
    """Seconds that a step may wait for episodes before the run stops as stalled."""

    @property
    def episodes_per_step(self) -> int:
        """group_size * groups_per_step."""
        return self.group_size * self.groups_per_step
