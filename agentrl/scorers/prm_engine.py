"""A process-reward model as a scorer of turns, served by an engine that speaks SGLang's protocol.

Two forms. **Classification**: SGLang serves a model with a head (``Qwen3ForSequenceClassification`` and its like) and
answers ``POST /classify`` with the head's numbers at the last token of ``input_ids``; ``/encode`` and
``/v1/embeddings`` give the same numbers, ``/v1/classify`` only probabilities. A folder of `agentrl prm train` has its
head over tokens, whose tensors have the same names, and is served as::

    python -m sglang.launch_server --model-path FOLDER --json-model-override-args \
        '{"architectures": ["Qwen3ForSequenceClassification"]}'

Both states of a turn are asked for, each by a request of its own: SGLang could value several tokens of one request
(``token_indices_to_pool``), but dies of that if its prefix cache has some of them. It also dies of ``/generate`` on
such a server, so what it serves is looked at first. The embedded engine serves no heads.

**Generative**: any engine, the embedded one too, is asked by ``POST /generate`` what log-probability it gives a word
behind the context and a question; nothing is generated. That values the state that a reply leads to, and no `prior`.

The version is the label of the server's weights (``weight_version`` of ``/model_info``), read before and after a batch
and compared with that of every answer. A batch during which it changed is asked again, so none mixes two.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import orjson
from pydantic import Field
from safetensors import safe_open

from agentrl.config.base import ConfigModel
from agentrl.inference.calls import GATEWAY_STATUSES, EngineHttp
from agentrl.inference.config import ClientConfig
from agentrl.inference.identity import mismatch
from agentrl.inference.transport import NoAnswerError, decoded, error_text
from agentrl.scorers.definition import UNREACHABLE, ScorerDefinition, ScorerSetting, TurnScorerConfig
from agentrl.scorers.served_models import check_tokenizer, read_token, served_tokenizer
from agentrl.tokens.tokenizer import FastTokenizer
from agentrl.types.errors import Boundary, ConfigError, EngineError, EpisodeError, Failure
from agentrl.types.turn_score import ScoredTurn, TurnKey, TurnScore

_MAX_ASKED = 4
_REFUSALS = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
_NOT_BEGUN = (HTTPStatus.TOO_MANY_REQUESTS, *GATEWAY_STATUSES)
_BIASED_BY_SGLANG = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")


class ClassificationForm(ConfigModel):
    """A served model with a head of one label (a number) or two (the probability of the second)."""

    kind: Literal["classification"] = "classification"
    """``POST /classify``."""


class GenerativeForm(ConfigModel):
    """A served language model that is asked a question about the turn."""

    kind: Literal["generative"]
    """``POST /generate``, of which nothing is generated."""
    question: Annotated[str, Field(min_length=1)]
    """Text behind the context, up to where the answer stands. A control token that it spells is meant as one."""
    good: Annotated[str, Field(min_length=1)]
    """The answer that the turn is worth 1 by; one token."""
    bad: str | None = None
    """The answer that it is worth 0 by; one token. The value is then the part of `good` in the probability of both,
    without it the probability of `good` alone."""


class PrmEngineConfig(TurnScorerConfig):
    """A process-reward model that a server computes."""

    kind: Literal["prm_engine"] = "prm_engine"
    """Asked by HTTP."""
    url: Annotated[str, Field(pattern=r"^https?://\S+$")]
    """The server's base address, such as ``http://10.0.0.5:30000``."""
    form: Annotated[ClassificationForm | GenerativeForm, Field(discriminator="kind")] = ClassificationForm()
    """What the server is asked."""
    tokenizer: Path | None = None
    """A folder with the served model's ``tokenizer.json``, where the server's own is not on this machine."""
    token_variable: str | None = None
    """Environment variable with the server's bearer token."""


class _Form(Protocol):
    """What one turn is asked by, and what the answers mean."""

    path: str

    def prompts(self, turn: ScoredTurn) -> list[list[int]]:
        """Token ids of the requests, at least one."""

    def body(self, prompt: list[int]) -> dict[str, Any]:
        """A request but for its id."""

    def read(self, answers: Sequence[dict[str, Any]]) -> list[float]:
        """The value, and the prior if there is one. Raises LookupError, TypeError or ValueError for what is none."""


class _Classification(_Form):
    path = "/classify"

    def prompts(self, turn: ScoredTurn) -> list[list[int]]:
        ids = turn.token_ids.tolist()
        return [ids, *([ids[: turn.reply_start]] if turn.reply_start else [])]

    def body(self, prompt: list[int]) -> dict[str, Any]:
        return {"input_ids": prompt}

    def read(self, answers: Sequence[dict[str, Any]]) -> list[float]:
        return [_of_labels(answer["embedding"]) for answer in answers]


class _Generative(_Form):
    path = "/generate"

    def __init__(self, config: GenerativeForm, tokenizer: FastTokenizer) -> None:
        """Raises ConfigError if an answer is not one token."""
        self._question = tokenizer.encode(config.question)
        answers = [config.good] if config.bad is None else [config.good, config.bad]
        ids = [tokenizer.encode(answer) for answer in answers]
        for answer, tokens in zip(answers, ids, strict=True):
            if len(tokens) != 1:
                raise ConfigError(f"the answer {answer!r} is {len(tokens)} tokens of the model; choose one that is one")
        self._answers = [tokens[0] for tokens in ids]

    def prompts(self, turn: ScoredTurn) -> list[list[int]]:
        return [[*turn.token_ids.tolist(), *self._question, answer] for answer in self._answers]

    def body(self, prompt: list[int]) -> dict[str, Any]:
        sampling = {"max_new_tokens": 0, "temperature": 1.0}
        start = len(prompt) - 2
        return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": start}

    def read(self, answers: Sequence[dict[str, Any]]) -> list[float]:
        logprobs = [_last_logprob(*pair) for pair in zip(answers, self._answers, strict=True)]
        return [math.exp(logprobs[0]) if len(logprobs) == 1 else _probability(*logprobs)]


def _last_logprob(answer: dict[str, Any], token: int) -> float:
    """Raises LookupError, TypeError or ValueError if it is none, or of another token."""
    logprob, scored = answer["meta_info"]["input_token_logprobs"][-1][:2]
    # SGLang names the last token of its vocabulary 0 here.
    if scored not in (token, 0):
        raise ValueError(f"token {scored} was scored, and {token} asked for")
    return float(logprob)


class _VersionChangedError(Exception):
    """The server has other weights than when the batch began."""


@dataclass(frozen=True, slots=True)
class _Served:
    """Which weights a server has: the folder that it names, and its label for them."""

    model: str
    label: str

    @property
    def version(self) -> str:
        return f"prm_engine:{Path(self.model).name}@{self.label}"


class PrmEngineScorer:
    """Values turns by asking a server, all of a batch at once; `asked_again` counts batches whose version changed."""

    def __init__(self, config: PrmEngineConfig, http: EngineHttp, form: _Form) -> None:
        self.asked_again = 0
        self._config, self._http, self._form = config, http, form

    async def score(self, turns: Sequence[ScoredTurn]) -> list[TurnScore]:
        """What the server says of each; a turn that it refuses has a failure.

        Raises:
            EpisodeError: it gives no answer, one to something else, or its version changed four times in a row.
        """
        for _ in range(_MAX_ASKED):
            try:
                return await self._ask(turns)
            except _VersionChangedError:
                self.asked_again += 1
        message = f"{self._config.url} changed its weights during each of {_MAX_ASKED} tries to score a batch"
        raise EpisodeError(Boundary.SCORER, "version", message)

    async def close(self) -> None:
        """Close the connections; safe to call twice."""
        await self._http.close()

    async def _ask(self, turns: Sequence[ScoredTurn]) -> list[TurnScore]:
        """Raises EpisodeError, or _VersionChangedError: whatever failed may have failed of the change."""
        served = await self._served()
        outcomes = await asyncio.gather(*(self._ask_of(turn, served) for turn in turns), return_exceptions=True)
        if await self._served() != served:
            raise _VersionChangedError
        scores: list[TurnScore] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            scores.append(outcome)
        return scores

    async def _served(self) -> _Served:
        """What the server has now. Raises EpisodeError."""
        try:
            info = await self._http.read("/model_info")
            return _Served(str(info["model_path"]), str(info["weight_version"]))
        except (EngineError, KeyError) as error:
            raise EpisodeError(Boundary.SCORER, UNREACHABLE, f"/model_info: {error}") from error

    async def _ask_of(self, turn: ScoredTurn, served: _Served) -> TurnScore:
        bodies = [{**self._form.body(ids), "rid": secrets.token_hex(16)} for ids in self._form.prompts(turn)]
        answers = await asyncio.gather(*(self._post(body) for body in bodies))
        for answer in answers:
            if isinstance(answer, Failure):
                return TurnScore(turn.key, served.version, failure=answer)
        given = [answer for answer in answers if not isinstance(answer, Failure)]
        # The embedded engine labels what it has drawn, and here it draws nothing.
        if any(answer["meta_info"].get("weight_version") not in (None, served.label) for answer in given):
            raise _VersionChangedError
        try:
            value, *priors = self._form.read(given)
            return TurnScore(turn.key, served.version, value=value, prior=next(iter(priors), None))
        except (LookupError, TypeError, ValueError) as error:
            message = f"{self._config.url}{self._form.path} answered no value: {type(error).__name__} {error}"
            raise EpisodeError(Boundary.SCORER, "answer", message) from error

    async def _post(self, body: dict[str, Any]) -> dict[str, Any] | Failure:
        """The answer to one request, or why it was refused. Raises EpisodeError."""
        where = f"{self._config.url}{self._form.path}"
        try:
            response = await self._http.post(self._form.path, orjson.dumps(body), self._config.call_s)
        except TimeoutError:
            message = f"{where} gave no answer within {self._config.call_s:g} s"
            raise EpisodeError(Boundary.SCORER, "timeout", message) from None
        except NoAnswerError as error:
            # What the server may have begun is not asked for a second time.
            kind = "lost" if error.is_delivered else UNREACHABLE
            raise EpisodeError(Boundary.SCORER, kind, f"{where}: {error}") from error
        if response.status in _REFUSALS:
            return Failure(Boundary.SCORER, "refused", f"{where}: {error_text(response)}")
        if response.status != HTTPStatus.OK:
            kind = UNREACHABLE if response.status in _NOT_BEGUN else "server"
            raise EpisodeError(Boundary.SCORER, kind, f"{where}: {error_text(response)}")
        answer = decoded(response)
        if (reason := mismatch(answer, body)) is not None:
            raise EpisodeError(Boundary.SCORER, "identity", f"{where} answered something else: {reason}")
        found: dict[str, Any] = answer
        return found


async def build(config: PrmEngineConfig, setting: ScorerSetting) -> PrmEngineScorer:
    """A scorer whose server has shown that it serves such a model.

    Raises:
        ConfigError: the server does not answer, serves another kind of model, or one of another tokenizer.
    """
    http = EngineHttp(
        config.name, config.url.rstrip("/"), ClientConfig(), read_token(config.name, config.token_variable)
    )
    try:
        info = await http.read("/model_info")
        _check_kind(config, info)
        tokenizer = served_tokenizer(config.name, config.url, info, config.tokenizer)
        what, remedy = "has a PRM of another tokenizer", "serve one that was fitted to this policy"
        check_tokenizer(config.name, what, tokenizer, setting.models, remedy)
        scorer = PrmEngineScorer(config, http, _form(config, tokenizer))
        await _probe(config, scorer)
    except (EngineError, EpisodeError) as error:
        await http.close()
        raise ConfigError(
            f"scorer '{config.name}': {error}; start the server before the run, or correct url"
        ) from error
    except ConfigError:
        await http.close()
        raise
    return scorer


def _check_kind(config: PrmEngineConfig, info: dict[str, Any]) -> None:
    """Raises ConfigError if the form does not fit the served model."""
    is_generative = isinstance(config.form, GenerativeForm)
    if info.get("is_generation", True) != is_generative:
        serves, form = ("a language model", "generative") if not is_generative else ("a head", "classification")
        raise ConfigError(f"scorer '{config.name}': {config.url} serves {serves}; give form.kind = \"{form}\"")
    known = set(info.get("architectures") or ()) & set(_BIASED_BY_SGLANG)
    weights = [] if is_generative or not known else sorted(Path(str(info["model_path"])).glob("*.safetensors"))
    if weights and not any("score.bias" in _tensors(file) for file in weights):
        raise ConfigError(
            f"scorer '{config.name}': SGLang gives the head of {known.pop()} a random offset at each start, since "
            f"{info['model_path']} has no tensor score.bias; add one of zeros, or use `agentrl prm train`"
        )


def _tensors(file: Path) -> set[str]:
    with safe_open(file, "np") as weights:
        return set(weights.keys())


def _form(config: PrmEngineConfig, tokenizer: Path) -> _Form:
    if isinstance(config.form, ClassificationForm):
        return _Classification()
    return _Generative(config.form, FastTokenizer.load(tokenizer))


async def _probe(config: PrmEngineConfig, scorer: PrmEngineScorer) -> None:
    """Value a turn of two tokens. Raises ConfigError or EpisodeError."""
    key = TurnKey("probe", "", 0, "")
    (score,) = await scorer.score([ScoredTurn(key, "", np.zeros(2, np.int32), 1)])
    if score.failure is not None:
        raise ConfigError(f"scorer '{config.name}': {config.url} refuses a context of two tokens: {score.failure}")


def _of_labels(numbers: Sequence[float]) -> float:
    """The value that a head's numbers give. Raises ValueError for other than one or two labels."""
    if len(numbers) == 1:
        return float(numbers[0])
    if len(numbers) == 2:
        return _probability(float(numbers[1]), float(numbers[0]))
    raise ValueError(f"a head of {len(numbers)} labels; it must have 1 or 2")


def _probability(good: float, bad: float) -> float:
    """Part of the first of two log-weights."""
    return 1.0 / (1.0 + math.exp(min(bad - good, 700.0)))


definition = ScorerDefinition(
    name="prm_engine",
    description="a process-reward model behind SGLang's protocol: a served head, or a question to a language model",
    config=PrmEngineConfig,
    build=build,
)
