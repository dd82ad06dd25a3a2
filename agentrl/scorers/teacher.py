"""A teacher as a scorer of turns: another policy's log-probabilities of the tokens of each reply.

With the credit rule ``teacher`` this is on-policy distillation by reverse KL; with an earlier policy as teacher it is a
KL penalty to that reference. Whoever serves the teacher scores tokens at temperature 1, from ids that are its own too:
teacher and student have one vocabulary.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import model_validator

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig
from agentrl.inference.fleet import Fleet
from agentrl.scorers.definition import UNREACHABLE, ScorerDefinition, ScorerSetting, TurnScorerConfig
from agentrl.tokens.vocabulary import vocabulary_difference
from agentrl.types.errors import Boundary, ConfigError, EngineError, EpisodeError, Failure
from agentrl.types.turn_score import ScoredTurn, TurnScore


class TeacherConfig(TurnScorerConfig):
    """Log-probabilities of another policy; give `policy`, or `url`."""

    kind: Literal["teacher"] = "teacher"
    """A teacher, or a reference policy."""
    policy: str = ""
    """A frozen policy of the recipe, whose engines the run starts."""
    url: str = ""
    """Address of an engine that somebody else runs, of SGLang's protocol."""
    token_variable: str | None = None
    """Environment variable with the token that the engine at `url` asks for."""
    model: Path | None = None
    """A folder with the ``tokenizer.json`` of the teacher at `url`, where the engine's own is not on this machine."""

    @model_validator(mode="after")
    def _names_one_teacher(self) -> TeacherConfig:
        if bool(self.policy) == bool(self.url):
            raise ValueError(
                f"scorer '{self.name}': give `policy`, a frozen policy of the recipe, or `url`, an address"
            )
        return self

    def uses_policies(self) -> tuple[str, ...]:
        """The frozen policy."""
        return (self.policy,) if self.policy else ()


class TeacherScorer:
    """Asks engines for log-probabilities; one after the other of those that serve, each turn by itself."""

    def __init__(self, name: str, fleet: Fleet, owned: EngineClient | None = None) -> None:
        self._name, self._fleet, self._owned = name, fleet, owned
        self._numbers = itertools.count()

    async def score(self, turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        """The log-probabilities of each reply, all at once. Raises EpisodeError (unreachable) if no engine serves."""
        return await asyncio.gather(*(self._score(turn) for turn in turns))

    async def close(self) -> None:
        """Close the connection to an engine that is not the run's."""
        if self._owned is not None:
            await self._owned.close()

    async def _score(self, turn: ScoredTurn) -> TurnScore:
        if not (names := self._fleet.healthy):
            raise EpisodeError(Boundary.SCORER, UNREACHABLE, f"no engine of {self._name} serves")
        member = self._fleet.members[names[next(self._numbers) % len(names)]]
        version = f"{self._name}:{member.version}"
        try:
            logprobs = await member.engine.score(turn.token_ids.tolist(), max(turn.reply_start, 1))
        except EngineError as error:
            return TurnScore(turn.key, version, failure=Failure(Boundary.SCORER, "engine", str(error)))
        if f"{self._name}:{member.version}" != version:
            failure = Failure(Boundary.SCORER, "version", f"{member.name} took other weights while it scored")
            return TurnScore(turn.key, version, failure=failure)
        return TurnScore(turn.key, version, logprobs=np.asarray(logprobs, np.float32))


async def build(config: TeacherConfig, setting: ScorerSetting) -> TeacherScorer:
    """A teacher whose vocabulary is that of the policies. Raises ConfigError."""
    if config.policy:
        served = setting.served[config.policy]
        _check_vocabulary(config, served.model, setting)
        return TeacherScorer(config.policy, served.fleet)
    token = os.environ.get(config.token_variable) if config.token_variable else None
    engine = EngineClient(config.name, config.url, ClientConfig(generate_s=config.call_s), token=token)
    try:
        info = await engine.model_info()
        _check_vocabulary(config, config.model or Path(str(info.get("tokenizer_path") or info["model_path"])), setting)
        version = await engine.probe()
    except (EngineError, KeyError) as error:
        await engine.close()
        raise ConfigError(f"scorer '{config.name}': {config.url} serves no teacher: {error}; start it there") from error
    except BaseException:
        await engine.close()
        raise
    return TeacherScorer(config.name, Fleet([engine], version), engine)


def _check_vocabulary(config: TeacherConfig, teacher: Path, setting: ScorerSetting) -> None:
    if not (teacher / "tokenizer.json").is_file():
        raise ConfigError(
            f"scorer '{config.name}': the teacher's tokenizer lies in {teacher}, which is not here; give a folder with "
            "a copy of its tokenizer.json as `model`"
        )
    for policy, folder in setting.models.items():
        if difference := vocabulary_difference(folder, teacher):
            raise ConfigError(
                f"scorer '{config.name}' is a teacher with another vocabulary than policy '{policy}': {difference}; "
                "log-probabilities of tokens can only be compared within one"
            )


definition = ScorerDefinition("teacher", "another policy's log-probabilities of each reply", TeacherConfig, build)
