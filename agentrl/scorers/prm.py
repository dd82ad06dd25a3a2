"""A process-reward model as a scorer of turns, computed in a process of its own with transformers.

One padded forward pass values two states of each turn: `prior` at the token before the reply, `value` at the reply's
last. The folder may be replaced by a newer model while the run goes on (`agentrl prm train --replace` does so): before
each batch the scorer looks at the folder's marker, and loads the folder anew if that names another version. A batch is
computed by one version, which its scores bear. A newer model that cannot be used is warned of, and the old one goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from agentrl.models.reward_folder import FolderChangingError, stated_version
from agentrl.process.threads import run_in_thread
from agentrl.scorers.definition import ScorerDefinition, ScorerSetting, TurnScorerConfig
from agentrl.scorers.served_models import check_tokenizer
from agentrl.types.errors import AgentRLError, Boundary, ConfigError, Failure, boundary
from agentrl.types.turn_score import ScoredTurn, TurnScore

if TYPE_CHECKING:
    from agentrl.models.reward import RewardModel

_log = logging.getLogger(__name__)
_CHANGING_TRIES = 100
_CHANGING_PAUSE_S = 0.2


class PrmConfig(TurnScorerConfig):
    """A process-reward model that a worker of the run computes."""

    kind: Literal["prm"] = "prm"
    """Computed with transformers."""
    model: Path
    """Its folder: a decoder with a head of one label (a number) or two (the probability of the second), over tokens or
    sequences, as `agentrl prm train` writes it; its tokenizer must be the policy's."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where it is computed, in float32."""
    threads: Annotated[int, Field(gt=0)] = 1
    """Processor cores for the arithmetic of each worker."""


class PrmScorer:
    """Values turns by the model that lies in a folder at the time."""

    def __init__(self, config: PrmConfig, setting: ScorerSetting, model: RewardModel) -> None:
        self._config, self._setting, self._model = config, setting, model
        self._refused = ""

    async def score(self, turns: Sequence[ScoredTurn]) -> list[TurnScore]:
        """What the model says of each; a context longer than it reads is a failure of its turn alone."""
        with boundary(Boundary.SCORER, "prm"):
            return await run_in_thread(f"scorer-{self._config.name}", lambda: self._score(turns))

    async def close(self) -> None:
        """Nothing is held but memory."""

    def _score(self, turns: Sequence[ScoredTurn]) -> list[TurnScore]:
        self._take_newer()
        model = self._model
        version = f"prm:{model.version}"
        limit = model.context_tokens
        read = [turn for turn in turns if limit is None or len(turn.token_ids) <= limit]
        places = [[*([turn.reply_start - 1] if turn.reply_start else []), len(turn.token_ids) - 1] for turn in read]
        values = iter(model.values([turn.token_ids for turn in read], places) if read else ())
        return [
            _score(turn, version, next(values)) if turn in read else _too_long(turn, version, limit) for turn in turns
        ]

    def _take_newer(self) -> None:
        """Load the folder anew if its marker names another version; what cannot be used is named once."""
        try:
            stated = stated_version(self._config.model)
            if stated is not None and stated.name != self._model.version:
                self._model = _load(self._config, self._setting)
        except AgentRLError as error:
            if str(error) != self._refused:
                _log.warning("scorer '%s' goes on with version %s: %s", self._config.name, self._model.version, error)
            self._refused = str(error)


def _score(turn: ScoredTurn, version: str, values: list[float]) -> TurnScore:
    return TurnScore(turn.key, version, value=values[-1], prior=values[0] if len(values) > 1 else None)


def _too_long(turn: ScoredTurn, version: str, limit: int | None) -> TurnScore:
    message = f"a context of {len(turn.token_ids)} tokens, and the model reads {limit}"
    return TurnScore(turn.key, version, failure=Failure(Boundary.SCORER, "too_long", message))


async def build(config: PrmConfig, setting: ScorerSetting) -> PrmScorer:
    """A scorer whose model is loaded.

    Waits for: a folder whose files are being replaced. Unblocked by: their replacement, 20 s.

    Raises:
        ConfigError: it is no such model, or its tokenizer is not that of the policies.
    """
    from agentrl.models.reward import use_device  # loads torch and transformers

    use_device(f"scorer '{config.name}'", config.device, config.threads)
    for last in (*[False] * _CHANGING_TRIES, True):
        try:
            return PrmScorer(config, setting, await asyncio.to_thread(_load, config, setting))
        except FolderChangingError as error:
            if last:
                raise ConfigError(f"scorer '{config.name}': {error}") from error
            await asyncio.sleep(_CHANGING_PAUSE_S)
    raise AssertionError("the last try returns or raises")


def _load(config: PrmConfig, setting: ScorerSetting) -> RewardModel:
    """Raises ConfigError or StorageError."""
    from agentrl.models.reward import RewardModel

    if not config.model.is_dir():
        raise ConfigError(
            f"scorer '{config.name}': no reward model at {config.model}; make one with `agentrl prm train`, or correct "
            "the path"
        )
    what, remedy = "has a PRM of another tokenizer", "fit one to this policy with `agentrl prm train`"
    check_tokenizer(config.name, what, config.model, setting.models, remedy)
    return RewardModel.load(config.model, config.device)


definition = ScorerDefinition(
    name="prm",
    description="a process-reward model, computed in workers of the run with transformers",
    config=PrmConfig,
    build=build,
    computes=True,
)
