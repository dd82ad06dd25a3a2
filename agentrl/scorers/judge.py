"""A language model as a judge of turns: any server of OpenAI's chat completions, by a rubric."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from agentrl.protocols import Scorer
from agentrl.scorers.definition import UNREACHABLE, ScorerDefinition, ScorerSetting, TurnScorerConfig
from agentrl.scorers.rubric import RESPONSE_FORMATS, Rubric
from agentrl.scorers.served_models import read_token
from agentrl.types.errors import Boundary, ConfigError, EpisodeError
from agentrl.types.turn_score import ScoredTurn, TurnKey, TurnScore

if TYPE_CHECKING:
    from agentrl.scorers.judge_endpoint import JudgeEndpoint
    from agentrl.tokens.tokenizer import FastTokenizer

_log = logging.getLogger(__name__)
_OURS = frozenset(("messages", "model", "n", "response_format", "stream"))
_SAMPLE = (TurnKey("sample", "agent", 0, ""), "user: What is 2 + 2?", "assistant: 2 + 2 is 4.")
_NOTHING_JUDGED = (UNREACHABLE, "busy")
_REMEDIES = {
    UNREACHABLE: "start the server, or correct url",
    "connection": "look into the server's log, or correct url",
    "timeout": "raise answer_s, or take a faster model",
    "key": "name the environment variable with its key as api_key_variable",
    "model": "correct model, or url, which often ends in /v1",
    "refused": 'correct model and options, and if it takes no response_format, set format = "text"',
    "server": "look into its log",
    "answer": "correct url: it must serve chat completions",
    "cut": "raise the limit in options",
    "prose": 'take a model that follows instructions, or format = "json_schema"',
    "value": 'take a model that follows instructions, or format = "json_schema"',
    "scale": "take a model that follows instructions, or a simpler scale",
    "identity": "take a model that copies ids, or a server without a cache of answers",
}


class JudgeConfig(TurnScorerConfig):
    """A language model grades each turn by a rubric; its score counts from 0 to 1, by the scale."""

    kind: Literal["judge"]
    """A judge behind an API."""
    url: str
    """Base address of a server of OpenAI's chat completions, such as ``http://localhost:8000/v1``."""
    model: str
    """Name of the model there."""
    rubric: Annotated[str, Field(min_length=1)]
    """By what it grades, in words."""
    scale: tuple[float, float]
    """Lowest and highest score of the rubric."""
    api_key_variable: str | None = None
    """Environment variable with the key of the API, where it wants one."""
    format: Literal["json_schema", "json_object", "text"] = "json_schema"
    """How JSON is asked for: by the field response_format, or by words alone where a server refuses that field."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request, such as ``{temperature = 0, max_completion_tokens = 300}``."""
    answer_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds for one answer; less than call_s."""
    check: bool = True
    """Whether it is asked of a sample turn before the first episode, so that what it cannot do shows then."""
    batch_turns: Annotated[int, Field(gt=0)] = 1
    """Turns of a batch, at most; each is a request of its own, and a score is known when its whole batch is. Turns that
    the server was too busy to take are sent again, if there are no others in their batch."""
    concurrency: Annotated[int, Field(gt=0)] = 16
    """Batches that are asked for at once."""

    @model_validator(mode="before")
    @classmethod
    def _has_a_scale(cls, values: Any) -> Any:
        if isinstance(values, dict) and "rubric" in values and "scale" not in values:
            raise ValueError("a rubric without a scale: give its lowest and its highest score, such as scale = [0, 10]")
        return values

    @model_validator(mode="after")
    def _can_be_asked(self) -> JudgeConfig:
        low, high = self.scale
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"scale [{low:g}, {high:g}] has no room: give the lowest score and then the highest")
        if self.answer_s >= self.call_s:
            raise ValueError(f"answer_s {self.answer_s:g} must be less than call_s {self.call_s:g}; set either")
        return self

    @field_validator("rubric")
    @classmethod
    def _says_something(cls, rubric: str) -> str:
        if not rubric.strip():
            raise ValueError("the rubric is empty: say what a good turn is")
        return rubric

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"'{url}' is no address: begin it with http:// or https://")
        return url

    @field_validator("options")
    @classmethod
    def _leaves_ours_alone(cls, options: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_OURS & options.keys()):
            raise ValueError(f"{taken} of a request are the judge's own; leave them out")
        return options


class Judge(Scorer):
    """Asks a server of each turn, all turns of a batch at once. Safe to repeat: a verdict changes nothing."""

    def __init__(
        self, rubric: Rubric, endpoint: JudgeEndpoint, config: JudgeConfig, tokenizers: Mapping[str, FastTokenizer]
    ) -> None:
        self._rubric, self._endpoint, self._tokenizers = rubric, endpoint, tokenizers
        asked_for = RESPONSE_FORMATS[config.format]
        self._options = {**config.options, **({"response_format": asked_for} if asked_for else {})}
        self._model = config.model

    async def score(self, turns: Sequence[ScoredTurn]) -> list[TurnScore]:
        """The verdict on each; one without has the failure instead.

        Raises:
            EpisodeError: boundary scorer, kind unreachable: the server took none of them.
        """
        scores = await asyncio.gather(*(self._score(turn) for turn in turns))
        not_taken = [s.failure for s in scores if s.failure is not None and s.failure.kind in _NOTHING_JUDGED]
        if not_taken and len(not_taken) == len(scores):
            raise EpisodeError(Boundary.SCORER, UNREACHABLE, not_taken[0].message)
        return scores

    async def ask(self, key: TurnKey, before: str, reply: str) -> TurnScore:
        """The verdict on a turn that is given as text. Raises EpisodeError (boundary scorer)."""
        question = self._rubric.ask(key, before, reply)
        answer = await self._endpoint.ask(question.messages, self._options)
        verdict = self._rubric.read(question, answer.text)
        return TurnScore(key, self._version(answer.model), verdict.value, note=verdict.reason)

    async def close(self) -> None:
        """Drop the connections."""
        await self._endpoint.close()

    async def _score(self, turn: ScoredTurn) -> TurnScore:
        tokenizer = self._tokenizers[turn.policy]
        before, reply = np.split(turn.token_ids, [turn.reply_start])
        try:
            return await self.ask(turn.key, tokenizer.decode(before.tolist()), tokenizer.decode(reply.tolist()))
        except EpisodeError as error:
            return TurnScore(turn.key, self._version(self._model), failure=error.failure)

    def _version(self, model: str) -> str:
        return f"{model}:{self._rubric.digest}"


def check_judge(config: JudgeConfig) -> None:
    """Whether a judge can be asked from here, as far as shows without asking it. Raises ConfigError."""
    if importlib.util.find_spec("openai") is None:
        raise ConfigError(f"scorer '{config.name}' needs the package openai: pip install 'agentrl[judge]'")
    read_token(config.name, config.api_key_variable)


async def build_judge(config: JudgeConfig, setting: ScorerSetting) -> Judge:
    """A judge that has been tried on a sample turn. Raises ConfigError."""
    check_judge(config)
    # The SDK takes seconds to import, in which the run's event loop goes on.
    await asyncio.to_thread(importlib.import_module, "agentrl.scorers.judge_endpoint")
    from agentrl.scorers.judge_endpoint import JudgeEndpoint
    from agentrl.tokens.tokenizer import FastTokenizer

    tokenizers = {policy: FastTokenizer.load(model) for policy, model in setting.models.items()}
    # The SDK wants a key even where the server does not, and would take that of OpenAI from the environment.
    key = read_token(config.name, config.api_key_variable) or "none"
    endpoint = JudgeEndpoint(config.url, config.model, key, config.answer_s)
    judge = Judge(Rubric(config.rubric, config.scale), endpoint, config, tokenizers)
    if config.check:
        try:
            await _try(config, judge)
        except BaseException:
            await judge.close()
            raise
    return judge


async def _try(config: JudgeConfig, judge: Judge) -> None:
    """Have it judge a sample turn. A server that is busy at that moment is there: no fault of the recipe."""
    try:
        await judge.ask(*_SAMPLE)
    except EpisodeError as error:
        failure = error.failure
        if failure.kind != "busy":
            message = f"the judge failed on a sample turn: {failure.message}; {_REMEDIES[failure.kind]}"
            raise ConfigError(f"scorer '{config.name}': {message}") from error
        _log.warning("scorer '%s' was not tried before the first episode: %s", config.name, failure.message)


definition = ScorerDefinition(
    "judge", "a language model behind an API, by a rubric", JudgeConfig, build_judge, check_judge
)
