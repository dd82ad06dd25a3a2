"""What a recipe says of how a run goes: the numbers that the simulation needs, and no others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from agentrl.inference.config import AttachedEngineConfig, SGLangEngineConfig
from agentrl.orchestration.config import RunConfig
from agentrl.scorers.config import FunctionScorerConfig
from agentrl.scorers.definition import TurnScorerConfig

_SIZES = ("tp-size", "tp_size", "tensor-parallel-size", "tensor_parallel_size")


@dataclass(frozen=True, slots=True)
class ScorerSetup:
    """A scorer that steps wait for: asked of each turn as it is played, or of each episode at its end.

    `slots` calls at once, each of up to `batch` turns.
    """

    of_turns: bool
    slots: float = math.inf
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Setup:
    """One policy's run. `places`, `max_staleness` and the rest as the recipe has them."""

    places: int
    group_size: int
    groups_per_step: int
    max_staleness: float
    staleness: Literal["mask_spans", "wait", "withhold"] = "mask_spans"
    order_window: int | None = None
    engines: int = 1
    ranks: int = 1
    gpus_per_engine: int = 1
    passes: int = 1
    """Times that a batch goes through the trainer."""
    colocated: bool = False
    scorers: Mapping[str, ScorerSetup] = field(default_factory=dict)
    steps: int = 1
    """Of the whole run."""

    @property
    def episodes_per_step(self) -> int:
        """group_size * groups_per_step."""
        return self.group_size * self.groups_per_step

    @property
    def gpus(self) -> int:
        """Devices of engines and trainer; shared ones once."""
        engines = self.engines * self.gpus_per_engine
        return max(engines, self.ranks) if self.colocated else engines + self.ranks


def setup_of(config: RunConfig, policy: str) -> Setup:
    """The run of one policy of a recipe.

    Its environments count as one. Of a scorer's pool the most workers count that it may grow to.
    """
    own, buffer = config.policies[policy], config.buffer_of(policy)
    played = config.played_by(policy)
    scorers = {}
    for name in played:
        required = config.required_scorers(name)
        for scorer in (s for s in config.environments[name].scorers if s.name in required):
            if isinstance(scorer, TurnScorerConfig):
                slots = scorer.pool.most * scorer.concurrency
                scorers[scorer.name] = ScorerSetup(True, slots, scorer.batch_turns)
            elif isinstance(scorer, FunctionScorerConfig):
                scorers[scorer.name] = ScorerSetup(False)
    return Setup(
        places=config.rollout.concurrency,
        group_size=buffer.group_size,
        groups_per_step=buffer.groups_per_step,
        max_staleness=buffer.staleness_bound,
        staleness=buffer.staleness,
        order_window=buffer.order_window,
        engines=len(own.engine.urls) if isinstance(own.engine, AttachedEngineConfig) else own.engine.count,
        ranks=own.trainer.ranks,
        gpus_per_engine=_gpus_per_engine(config, policy),
        passes=own.algorithm.epochs,
        colocated=config.runtime.colocated,
        scorers=scorers,
        steps=config.steps,
    )


def _gpus_per_engine(config: RunConfig, policy: str) -> int:
    engine = config.policies[policy].engine
    if not isinstance(engine, SGLangEngineConfig):
        return 1
    if engine.devices:
        return len(engine.devices[0].split(","))
    return next((int(engine.args[name]) for name in _SIZES if name in engine.args), 1)
