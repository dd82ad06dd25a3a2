"""Environments of verifiers before 0.4, which `load_environment` makes; rollouts by its own renderer client."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from agentrl.types.environment import Score
from agentrl.types.errors import ConfigError
from agentrl_environments.packages import Package
from agentrl_environments.verifiers.options import LegacyOptions
from agentrl_environments.verifiers.played import NO_KEY, Played, Posed, keep, renderer_config

PACKAGE = Package("verifiers", "==0.3.1", more="'renderers==0.1.10'")
_KEPT = ("reward", "metrics", "error", "stop_condition", "is_truncated")
_TOKENS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs")


class LegacyRollouts:
    """One environment that a package makes, and the rows of its dataset."""

    def __init__(self, options: LegacyOptions) -> None:
        self._vf: Any = PACKAGE.load("verifiers", options)
        self._clients: Any = importlib.import_module("verifiers.clients")
        self._options = options
        self.name = f"environment {options.id}"
        try:
            self._env = self._vf.load_environment(options.id, **options.arguments)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"options.id: {error} Its package is to be installed in {sys.executable}, and takes options.arguments"
            ) from error
        if self._env.requires_group_rollouts:
            raise ConfigError(f"{self.name} rewards whole groups, which are not played together here; choose another")
        has_own = self._env.dataset is not None or self._env.eval_dataset is None
        self._rows: Any = self._env.get_dataset() if has_own else self._env.get_eval_dataset()

    @property
    def num_tasks(self) -> int:
        """Rows of its dataset."""
        return len(self._rows)

    def task(self, index: int) -> Posed:
        """A row by its place. Raises ConfigError if there is none."""
        if not 0 <= index < len(self._rows):
            raise ConfigError(f"{self.name} has {len(self._rows)} tasks, and none of index {index}")
        row = dict(self._rows[index])
        said = [message["content"] for message in row["prompt"] if isinstance(message["content"], str)]
        key = hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()
        return Posed(index, key, "\n\n".join(said) or f"task {index} of {self.name}", row)

    async def play(self, posed: Posed, url: str, agent: str, episode: str) -> Played:
        """Play a row by replies of an agent, which the session at a URL gives."""
        config = self._vf.ClientConfig(
            client_type="renderer",
            api_base_url=url,
            api_key_var=NO_KEY,
            renderer_config=renderer_config(self._options),
            renderer_model_name=str(self._options.model),
            max_retries=0,
        )
        client = self._clients.RendererClient(config)
        try:
            output = await self._env.run_rollout(posed.task, client, agent, {}, state_columns=["trajectory"])
        finally:
            await client.close()
        turns = [{name: turn["tokens"][name] for name in _TOKENS} for turn in output["trajectory"] if turn["tokens"]]
        keep({name: output.get(name) for name in _KEPT} | {"trajectory": turns}, self._options.traces, episode)
        return account(output)


def legacy_rollouts_of(options: LegacyOptions) -> LegacyRollouts:
    """The environment of these options in this process, made by the first that asks. Raises ConfigError."""
    return _made(options.model_dump_json())


@lru_cache(maxsize=4)
def _made(options: str) -> LegacyRollouts:
    return LegacyRollouts(LegacyOptions.model_validate_json(options))


def account(output: Mapping[str, Any]) -> Played:
    """What a rollout's output says: its reward, and the error of one that has failed."""
    if (error := output.get("error")) is not None:
        return Played(Score(None), (str(error["error_chain_str"]),))
    reward, metrics = output["reward"], output["metrics"] or {}
    found = {name: float(value) for name, value in metrics.items() if value is not None}
    found["verifiers_turns"] = float(len(output["trajectory"]))
    said = [message["content"] for message in output["completion"] or () if message["role"] == "assistant"]
    words = said[-1] if said and isinstance(said[-1], str) else ""
    return Played(Score(None if reward is None else float(reward), found), last_words=words)
