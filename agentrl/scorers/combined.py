"""A score of turns that is computed of other scorers' scores of the same episode; nobody is asked."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.config.base import ConfigModel
from agentrl.protocols import Scorer
from agentrl.scorers.definition import ScorerDefinition, ScorerSetting, TurnScorerConfig
from agentrl.types.environment import Score
from agentrl.types.episode import Episode
from agentrl.types.errors import Boundary, ConfigError, Failure
from agentrl.types.score import scored_turns
from agentrl.types.turn_score import TurnKey, TurnScore

Finite = Annotated[float, Field(allow_inf_nan=False)]
_OF_ASKING = ("late", "deadline_s", "patience_s", "call_s", "batch_turns", "concurrency", "pool")


class GateConfig(ConfigModel):
    """A turn counts only where a scorer says enough of it, or of its whole episode."""

    scorer: str
    """Name of a scorer of the same environment."""
    at_least: Finite
    """What its value of the turn, or its reward for the episode, must reach."""


class CombinedConfig(TurnScorerConfig):
    """The weighted sum of other scores: 0 where a gate is closed, then clipped."""

    kind: Literal["combined"]
    """Computed of other scorers' scores."""
    parts: dict[str, Finite]
    """Weight of each part, by the name of a scorer of the same environment. One of whole episodes says its reward of
    each turn."""
    normalise: bool = False
    """Whether the sum is divided by that of the weights."""
    gates: tuple[GateConfig, ...] = ()
    """All must be open for a turn to count; behind a closed one it is worth 0."""
    clip: tuple[Finite, Finite] | None = None
    """Lowest and highest value; what is beyond becomes the nearer of both."""

    @model_validator(mode="after")
    def _makes_something(self) -> CombinedConfig:
        if not any(self.parts.values()):
            raise ValueError(f"the weights {self.parts} sum to nothing: give a part a weight")
        if self.normalise and math.isclose(sum(self.parts.values()), 0.0, abs_tol=1e-9):
            raise ValueError(f"the weights {self.parts} sum to nothing to divide by: set normalise = false")
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip {list(self.clip)} has no room: give the lowest value and then the highest")
        given = {key: (getattr(self, key), TurnScorerConfig.model_fields[key].default) for key in _OF_ASKING}
        if idle := [key for key, (value, default) in given.items() if value != default]:
            raise ValueError(f"{idle} mean nothing here, where nobody is asked: set them at the parts")
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the scorers that it needs, each once."""
        return tuple(dict.fromkeys([*self.parts, *(gate.scorer for gate in self.gates)]))


@dataclass(frozen=True, slots=True)
class _Said:
    """What a source says of one turn, and the version of that."""

    value: float | None
    prior: float | None
    version: str


def combine(config: CombinedConfig, episode: Episode) -> tuple[TurnScore, ...] | None:
    """The combined score of each turn of its policies, in order; None while a source misses one, or failed at one.

    Values make the value and priors the prior, where every part has it; a turn of which the parts have neither in
    common has a failure. Gates look at values. The value of a whole episode is its prior, too: the agent's reward, or
    else the episode's, without rewards of turns.
    """
    agents = {turn.agent for turn in episode.turns}
    of_turns = {name: {score.key: score for score in scores} for name, scores in episode.turn_scores.items()}
    of_episode = {
        record.scorer: {agent: _reward(record.score, agent) for agent in agents}
        for record in episode.scores
        if record.score is not None
    }
    combined = []
    for turn in scored_turns(episode):
        if config.policies and turn.policy not in config.policies:
            continue
        key = turn.key
        said = {name: _find(name, key, of_turns, of_episode) for name in config.sources}
        known = {name: source for name, source in said.items() if source is not None}
        if len(known) < len(said):
            return None
        combined.append(_combine_turn(config, key, known))
    return tuple(combined)


def in_order(configs: Iterable[CombinedConfig]) -> tuple[CombinedConfig, ...]:
    """Each behind those that it is made of. Raises ConfigError where some are made of one another."""
    by_name = {config.name: config for config in configs}
    needed = {name: [s for s in config.sources if s in by_name] for name, config in by_name.items()}
    try:
        return tuple(by_name[name] for name in TopologicalSorter(needed).static_order())
    except CycleError as error:
        circle = " -> ".join(error.args[1])
        raise ConfigError(f"scorers are made of one another: {circle}; take one out of its parts or gates") from None


def _find(
    name: str,
    key: TurnKey,
    of_turns: Mapping[str, Mapping[TurnKey, TurnScore]],
    of_episode: Mapping[str, Mapping[str, float | None]],
) -> _Said | None:
    """What a source says of a turn; None if it is missing or has failed."""
    if name not in of_turns:
        reward = of_episode.get(name, {}).get(key.agent)
        return None if reward is None else _Said(reward, reward, "")
    # Such a source has a record of the whole episode as well: the mean of its turns.
    score = of_turns[name].get(key)
    if score is None or score.failure is not None:
        return None
    return _Said(score.value, score.prior, score.version)


def _reward(score: Score, agent: str) -> float | None:
    return score.agent_rewards.get(agent, score.reward)


def _combine_turn(config: CombinedConfig, key: TurnKey, said: Mapping[str, _Said]) -> TurnScore:
    version = f"combined:{_digest(config, said)}"
    values = {name: source.value for name, source in said.items()}
    priors = {name: said[name].prior for name in config.parts}
    silent = [gate.scorer for gate in config.gates if values[gate.scorer] is None]
    value, prior = _weigh(config, values), _weigh(config, priors)
    if silent or (value is None and prior is None):
        message = f"{silent or list(config.parts)} give no value of {key} to be combined"
        return TurnScore(key, version, failure=Failure(Boundary.SCORER, "parts", message))
    closed = [g.scorer for g in config.gates if (opens := values[g.scorer]) is not None and opens < g.at_least]
    if closed:
        value, prior = (None if number is None else 0.0 for number in (value, prior))
    note = f"gate of {', '.join(closed)} closed" if closed else _note(config.parts, values)
    return TurnScore(key, version, _clip(config, value), _clip(config, prior), note=note)


def _weigh(config: CombinedConfig, numbers: Mapping[str, float | None]) -> float | None:
    """The weighted sum; None where a part has no number."""
    terms = []
    for name, weight in config.parts.items():
        number = numbers[name]
        if number is None:
            return None
        terms.append(weight * number)
    return sum(terms) / (sum(config.parts.values()) if config.normalise else 1.0)


def _clip(config: CombinedConfig, number: float | None) -> float | None:
    if number is None or config.clip is None:
        return number
    lowest, highest = config.clip
    return min(max(number, lowest), highest)


def _note(parts: Mapping[str, float], values: Mapping[str, float | None]) -> str:
    return " + ".join(
        f"{weight:g} {name} {values[name]:.3g}" for name, weight in parts.items() if values[name] is not None
    )


def _digest(config: CombinedConfig, said: Mapping[str, _Said]) -> str:
    """Of what it is computed by, and of the versions that it is computed of."""
    rule = config.model_dump_json(include={"parts", "normalise", "gates", "clip"})
    versions = "\0".join(f"{name}\0{source.version}" for name, source in sorted(said.items()))
    return hashlib.blake2b(f"{rule}\0{versions}".encode(), digest_size=4).hexdigest()


async def _nobody_to_ask(config: CombinedConfig, setting: ScorerSetting) -> Scorer:
    raise ConfigError(f"scorer '{config.name}' is computed of other scores by `combine`: it cannot be asked")


definition = ScorerDefinition("combined", "computed of other scorers' scores", CombinedConfig, _nobody_to_ask)
