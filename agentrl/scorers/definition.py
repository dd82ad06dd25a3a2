"""What a kind of scorers of turns is, for the registry."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Generic, Literal, Protocol, TypeVar

from pydantic import Field

from agentrl.config.base import ConfigModel
from agentrl.inference.fleet import Fleet
from agentrl.protocols import Scorer


class PoolConfig(ConfigModel):
    """The workers of a scorer."""

    least: Annotated[int, Field(gt=0)] = 1
    """Workers that there always are."""
    most: Annotated[int, Field(gt=0)] = 1
    """Workers at most; more than the least are started while turns wait for longer than `queue_s`."""
    queue_s: Annotated[float, Field(gt=0)] = 2.0
    """Seconds that a turn may wait for a worker before there is one more."""
    max_waiting: Annotated[int, Field(gt=0)] = 4096
    """Turns that may wait; beyond, no new episode begins."""


class DivergenceConfig(ConfigModel):
    """The alarm that a policy learns to please a scorer, instead of to succeed."""

    action: Literal["warn", "stop", "ignore"] = "warn"
    """What happens then."""
    episodes: Annotated[int, Field(ge=16)] = 256
    """The last episodes, whose older and newer half are compared: values that rose, and outcomes that fell."""


class TurnScorerConfig(ConfigModel):
    """What every scorer of turns has; each kind adds its own fields."""

    kind: str
    """Registered name of the kind, or ``module:attribute``."""
    name: str
    """Name of its scores in metrics and records."""
    weight: float = 0.0
    """Part that the mean of its turns' values has in the reward; it changes what is optimised. 0, as a rule: credit
    rules use the scores without that."""
    late: Literal["wait", "drop", "outcome_only"] = "outcome_only"
    """What becomes of an episode whose turns it has not all judged `deadline_s` after the end of play: it goes on
    waiting (for `patience_s`, then the run stops), it is dropped, or it counts by its outcome alone."""
    deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds until its scores are late, from the end of play and of what functions of episodes say."""
    patience_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that an episode waits under ``late = "wait"`` before the run stops and names this scorer; less than
    `buffer.stall_s`, so that it is this scorer which is named."""
    call_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for one batch; a worker that takes longer is replaced."""
    batch_turns: Annotated[int, Field(gt=0)] = 16
    """Turns of a batch, at most; fewer where no more wait."""
    concurrency: Annotated[int, Field(gt=0)] = 4
    """Batches that one worker has at once, if it waits for others (a server, an API) rather than computes."""
    pool: PoolConfig = PoolConfig()
    """Its workers, and the turns that wait for them."""
    policies: tuple[str, ...] = ()
    """Policies whose turns it judges; empty for all."""
    divergence: DivergenceConfig = DivergenceConfig()
    """What happens when its values rise while outcomes fall."""

    def uses_policies(self) -> tuple[str, ...]:
        """Policies whose engines it asks, though no agent may act by them."""
        return ()

    def snapshots_of(self) -> str:
        """The policy whose earlier versions an engine of the scorer's own is to serve; empty for none."""
        return ""


UNREACHABLE = "unreachable"
"""Kind of a scorer's failure that says that nothing was sent: such turns are sent again."""


def nothing_to_check(config: TurnScorerConfig) -> None:
    """The check of a kind whose recipe says nothing that could be wrong by itself."""


Options = TypeVar("Options", bound=TurnScorerConfig)


class Snapshot(Protocol):
    """An engine that serves an earlier version of a policy, and takes later ones now and then."""

    fleet: Fleet

    def scoring(self) -> AbstractAsyncContextManager[None]:
        """Score turns within the block, by one version."""


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """A policy that a scorer asks: its model folder, and the engines that serve it."""

    model: Path
    fleet: Fleet


@dataclass(frozen=True, slots=True)
class ScorerSetting:
    """What a scorer may know of the run that it judges for.

    `models` has the model folder of each policy whose turns it judges; the turns are of its tokenizer. `served` has the
    policies that it asked for by `uses_policies`, `snapshots` the engines of `snapshots_of` by the scorer's name; there
    are none in a process of its own.
    """

    models: Mapping[str, Path]
    served: Mapping[str, ServedPolicy] = field(default_factory=dict)
    snapshots: Mapping[str, Snapshot] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScorerDefinition(Generic[Options]):
    """A kind of scorers of turns, to be registered as entry point ``agentrl.scorers``.

    `build(config, setting)` makes one that is ready; it raises ConfigError if it cannot score turns of these policies,
    and says why. `check(config)` raises it for what shows before, with nothing started or asked. One that `computes`
    runs in processes of its own, one batch at a time; others share the run's event loop, since they wait for servers.
    """

    name: str
    description: str
    config: type[Options]
    build: Callable[[Options, ScorerSetting], Awaitable[Scorer]]
    check: Callable[[Options], None] = nothing_to_check
    computes: bool = False
