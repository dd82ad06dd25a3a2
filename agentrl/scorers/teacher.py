"""A teacher as a scorer of turns: another policy's log-probabilities of the tokens of each reply.

With the credit rule ``teacher`` this is on-policy distillation by reverse KL; with an earlier policy as teacher it is a
KL penalty to that reference. Whoever serves the teacher scores tokens at temperature 1, from ids that are its own too:
teacher and student have one vocabulary.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import model_validator

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig
from agentrl.inference.fleet import Fleet
from agentrl.protocols import Engine
from agentrl.scorers.definition import UNREACHABLE, ScorerDefinition, ScorerSetting, TurnScorerConfig
from agentrl.scorers.served_models import check_tokenizer, read_token, served_tokenizer
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
    tokenizer: Path | None = None
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
    """Asks the engines of a policy of the run; one after the other of those that serve, each turn by itself."""

    def __init__(self, name: str, fleet: Fleet) -> None:
        self._name, self._fleet = name, fleet
        self._numbers = itertools.count()

    async def score(self, turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        """The log-probabilities of each reply, all at once. Raises EpisodeError (unreachable) if no engine serves."""
        return await asyncio.gather(*(self._score(turn) for turn in turns))

    async def close(self) -> None:
        """The engines are the run's."""

    async def _score(self, turn: ScoredTurn) -> TurnScore:
        if not (names := self._fleet.healthy):
            raise EpisodeError(Boundary.SCORER, UNREACHABLE, f"no engine of {self._name} serves")
        member = self._fleet.members[names[next(self._numbers) % len(names)]]
        version = member.version
        score = await _scored(member.engine, turn, f"{self._name}:{version}")
        if member.version != version:
            failure = Failure(Boundary.SCORER, "version", f"{member.name} took other weights while it scored")
            return TurnScore(turn.key, score.version, failure=failure)
        return score


class OutsideTeacher:
    """Asks an engine that somebody else runs, who may give it other weights: a batch is scored by one version."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def score(self, turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        """The log-probabilities of each reply, all at once.

        Raises:
            EpisodeError: the engine does not answer (unreachable), or took other weights meanwhile (version).
        """
        version = await self._version()
        scores = await asyncio.gather(*(_scored(self._engine, turn, version) for turn in turns))
        if (now := await self._version()) != version:
            raise EpisodeError(Boundary.SCORER, "version", f"{version} became {now} while it scored a batch")
        return scores

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.close()

    async def _version(self) -> str:
        """What the engine calls its weights now. Raises EpisodeError."""
        try:
            return f"{self._engine.name}:{(await self._engine.model_info()).get('weight_version')}"
        except EngineError as error:
            raise EpisodeError(Boundary.SCORER, UNREACHABLE, str(error)) from error


async def _scored(engine: Engine, turn: ScoredTurn, version: str) -> TurnScore:
    """An engine's log-probabilities of a reply, but for a first token without context; a failure if it refuses."""
    try:
        logprobs = await engine.score(turn.token_ids.tolist(), max(turn.reply_start, 1))
    except EngineError as error:
        return TurnScore(turn.key, version, failure=Failure(Boundary.SCORER, "engine", str(error)))
    return TurnScore(turn.key, version, logprobs=np.asarray(logprobs, np.float32))


async def build(config: TeacherConfig, setting: ScorerSetting) -> TeacherScorer | OutsideTeacher:
    """A teacher whose vocabulary is that of the policies. Raises ConfigError."""
    if config.policy:
        served = setting.served[config.policy]
        _check_vocabulary(config, served.model, setting)
        return TeacherScorer(config.policy, served.fleet)
    token = read_token(config.name, config.token_variable)
    engine = EngineClient(config.name, config.url, ClientConfig(load_s=config.call_s), token=token)
    try:
        info = await engine.model_info()
        _check_vocabulary(config, served_tokenizer(config.name, config.url, info, config.tokenizer), setting)
        # It is anybody's: what it calls its weights need not be a version of ours, as a probe would have it.
        if not await engine.is_well(config.call_s):
            raise EngineError("it is not well")
    except (EngineError, KeyError) as error:
        await engine.close()
        raise ConfigError(f"scorer '{config.name}': {config.url} serves no teacher: {error}; start it there") from error
    except BaseException:
        await engine.close()
        raise
    return OutsideTeacher(engine)


def _check_vocabulary(config: TeacherConfig, tokenizer: Path, setting: ScorerSetting) -> None:
    what, remedy = "is a teacher with another vocabulary", "log-probabilities can only be compared within one"
    check_tokenizer(config.name, what, tokenizer, setting.models, remedy)


definition = ScorerDefinition("teacher", "another policy's log-probabilities of each reply", TeacherConfig, build)
