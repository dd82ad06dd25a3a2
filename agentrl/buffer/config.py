"""How many episodes make a step, and how stale a token may be."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.config.base import ConfigModel


class BufferConfig(ConfigModel):
    """The episode buffer of a run."""

    group_size: Annotated[int, Field(gt=0)] = 8
    """Episodes of one task; their mean reward is the baseline. 1 has no baseline."""
    groups_per_step: Annotated[int, Field(gt=0)] = 8
    """Groups of one batch, which makes one version of the policies."""
    max_staleness: Annotated[int, Field(ge=0)] | Literal["unbounded"] = 4
    """Steps between the weights that sampled a token and those that train on it. 0 generates
    and trains in turn, reproducibly; 2 to 8 keep both busy. Below 4 long episodes lose tokens that are too old
    (the benchmark `selection_bias` measures how many). ``unbounded`` trains tokens of any age and starts episodes
    wherever there is a place; it needs a correction, and episodes pile up if they come faster than steps."""
    staleness: Literal["mask_spans", "wait", "withhold"] = "mask_spans"
    """What becomes of older tokens: they are masked; or the step waits for episodes about to expire
    (unbiased, slower); or the whole episode is left out and only its reward counts in the group."""
    order_window: Annotated[int, Field(gt=0)] | None = None
    """Groups by which a step may run ahead of the oldest group that is still on its way, at least groups_per_step;
    none sets no bound. Two steps' groups halve the tokens that grow too old, and steps wait more for slow episodes:
    set it where ``agentrl runs bias`` shows that too little of long episodes is trained."""
    forks: Annotated[int, Field(ge=0)] = 0
    """Members of a group, its last, that are not played from the start: they all go on from one state of its first
    member that ended well, and are compared with each other alone. The state is drawn uniformly among those behind
    a turn of it that the environment answered and another turn followed; never by the outcome. Only their own tokens
    are trained. At least 2, or none."""
    group_filter: Literal["none", "spread"] = "none"
    """``spread`` drops groups whose rewards do not differ and samples others in their place."""
    max_filtered_groups: Annotated[int, Field(gt=0)] = 200
    """Groups that may be dropped in a row, by the filter or for failed episodes, before the run stops: nothing
    is left to learn."""
    stall_s: Annotated[float, Field(gt=0)] = 900.0
    """Seconds that a step may wait for episodes before the run stops as stalled."""

    @model_validator(mode="after")
    def _window_holds_a_step(self) -> BufferConfig:
        if self.order_window is not None and self.order_window < self.groups_per_step:
            raise ValueError(
                f"order_window {self.order_window} is less than groups_per_step {self.groups_per_step}, and the "
                "groups of one step have no order: set at least groups_per_step, or none"
            )
        return self

    @model_validator(mode="after")
    def _forks_have_a_parent_and_each_other(self) -> BufferConfig:
        if self.forks >= self.group_size and self.forks:
            raise ValueError(
                f"forks {self.forks} is not less than group_size {self.group_size}, and some member must be played "
                "from the start for others to go on from"
            )
        if self.forks == 1:
            raise ValueError("forks 1: a fork is compared with others from the same state; set 2 or more, or 0")
        return self

    @property
    def staleness_bound(self) -> float:
        """`max_staleness` as a number, infinite if there is no bound."""
        return math.inf if self.max_staleness == "unbounded" else self.max_staleness

    @property
    def episodes_per_step(self) -> int:
        """group_size * groups_per_step."""
        return self.group_size * self.groups_per_step
