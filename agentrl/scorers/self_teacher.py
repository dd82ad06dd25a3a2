"""A policy's own earlier version as its teacher: log-probabilities of a snapshot that follows it at a distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.scorers.definition import ScorerDefinition, ScorerSetting, TurnScorerConfig
from agentrl.scorers.teacher import TeacherScorer
from agentrl.types.turn_score import ScoredTurn, TurnScore


class SelfTeacherConfig(TurnScorerConfig):
    """Log-probabilities of an earlier version of the policy itself, on an engine that the run starts for it."""

    kind: Literal["self_teacher"] = "self_teacher"
    """A snapshot of the policy."""
    policy: str
    """The policy; only its turns are judged."""
    interval_steps: Annotated[int, Field(gt=0)] = 20
    """Steps from one snapshot to the next."""
    lag_steps: Annotated[int, Field(ge=0)] = 0
    """Steps that a snapshot is behind the newest version, at least, when it begins to teach."""

    @model_validator(mode="before")
    @classmethod
    def _judges_its_policy(cls, values: object) -> object:
        if isinstance(values, dict) and "policy" in values:
            return {"policies": (values["policy"],), **values}
        return values

    def snapshots_of(self) -> str:
        """The policy that an engine of this scorer follows."""
        return self.policy


class SelfTeacherScorer:
    """Asks the snapshot's engine; a batch is scored by one version."""

    def __init__(self, setting: ScorerSetting, config: SelfTeacherConfig) -> None:
        self._snapshot = setting.snapshots[config.name]
        self._teacher = TeacherScorer(config.name, self._snapshot.fleet)

    async def score(self, turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        """The log-probabilities of each reply. Raises EpisodeError (unreachable) if the engine does not serve."""
        async with self._snapshot.scoring():
            return await self._teacher.score(turns)

    async def close(self) -> None:
        """The engine is the run's."""


async def build(config: SelfTeacherConfig, setting: ScorerSetting) -> SelfTeacherScorer:
    """The scorer; its engine has been started."""
    return SelfTeacherScorer(setting, config)


definition = ScorerDefinition(
    "self_teacher", "an earlier version of the policy as its own teacher", SelfTeacherConfig, build
)
