"""verifiers in this process: one of its environments, the tasks of its taskset, rollouts by its own train client."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentrl.types.environment import Score
from agentrl.types.errors import ConfigError
from agentrl_environments.packages import Package
from agentrl_environments.verifiers.options import VerifiersOptions
from agentrl_environments.verifiers.played import NO_KEY, Played, Posed, keep, renderer_config

PACKAGE = Package("verifiers", "==0.4.0")
CHAT = "agentrl_chat"
"""Id of the harness that roles without one play by."""
_AT_HAND = 256


class TasksetRollouts:
    """One environment of verifiers over a taskset."""

    def __init__(self, options: VerifiersOptions) -> None:
        self._vf: Any = PACKAGE.load("verifiers.v1", options)
        self._options = options
        self._env = _load_env(self._vf, options)
        self._taskset: Any = self._env.taskset
        self.name: str = f"taskset {self._env.config.taskset.id}"
        self._tasks: list[Any] | None = list(self._taskset) if self._taskset.bounded else None
        self._stream: Iterator[Any] = iter(())
        self._next = 0
        self._streamed_tasks: OrderedDict[int, Any] = OrderedDict()

    @property
    def num_tasks(self) -> int | None:
        """Tasks of the taskset; None if it has no end."""
        return None if self._tasks is None else len(self._tasks)

    def task(self, index: int) -> Posed:
        """A task by its place in the taskset. Raises ConfigError if there is none."""
        if self._tasks is not None and not 0 <= index < len(self._tasks):
            raise ConfigError(f"{self.name} has {len(self._tasks)} tasks, and none of index {index}")
        task = self._streamed(index) if self._tasks is None else self._tasks[index]
        return Posed(index, task.key, task.data.prompt_text or task.data.name or f"task {index} of {self.name}", task)

    async def play(self, posed: Posed, url: str, agent: str, episode: str) -> Played:
        """Play a task; replies come from the session at a URL, by `agent` unless a role's ``model`` says another."""
        client = self._vf.TrainClientConfig(
            base_url=url,
            api_key_var=NO_KEY,
            renderer=renderer_config(self._options),
            renderer_model_name=str(self._options.model),
        )
        context = self._vf.ModelContext(client=client, model=agent, sampling=self._vf.SamplingConfig())
        async with self._env.serving():
            (slot,) = self._env.slots(posed.task)
            record = await self._env.run_slot(slot, context)
        keep(record.to_record(float_decimals=None), self._options.traces, episode)
        return account(record, url)

    def _streamed(self, index: int) -> Any:
        """A task of a taskset without an end, which is read on to it; one that was asked for lately is at hand."""
        if index in self._streamed_tasks:
            return self._streamed_tasks[index]
        if index < self._next:
            self._next = 0
        if self._next == 0:
            self._stream = iter(self._taskset)
        task = next(itertools.islice(self._stream, index - self._next, None), None)
        if task is None:
            raise ConfigError(f"{self.name} says that it has no end, and has no task of index {index}")
        self._next = index + 1
        self._streamed_tasks[index] = task
        if len(self._streamed_tasks) > _AT_HAND:
            self._streamed_tasks.popitem(last=False)
        return task


def rollouts_of(options: VerifiersOptions) -> TasksetRollouts:
    """The environment of these options in this process, made by the first that asks. Raises ConfigError."""
    return _made(options.model_dump_json())


@lru_cache(maxsize=4)
def _made(options: str) -> TasksetRollouts:
    return TasksetRollouts(VerifiersOptions.model_validate_json(options))


def account(record: Any, url: str) -> Played:
    """What a record of verifiers says of the policies at a URL: each of their agents has the reward of its trace.

    Traces of models elsewhere, such as a judge's, are none of ours.
    """
    errors = [*record.errors, *(error for trace in record.traces for error in trace.errors)]
    if not record.ok or errors:
        named = tuple(f"{error.type}: {error.message}" for error in errors)
        return Played(Score(None), named or (f"verifiers calls its episode {record.id} failed, and names no error",))
    ours = [trace for trace in record.traces if trace.agent.trainable and trace.agent.config.client.base_url == url]
    by_agent = {trace.agent.config.model: trace for trace in ours}
    if len(by_agent) < len(ours) or not ours:
        seats = ", ".join(trace.agent.name for trace in ours) or "none"
        message = f"verifiers rewards these traces apart: {seats}; give each role a model of its own, an agent's name"
        return Played(Score(None), (message,))
    rewards = {agent: _reward(trace) for agent, trace in by_agent.items()}
    metrics = {name: value for trace in ours for name, value in _metrics(trace).items()}
    first, *others = rewards.values()
    apart = {agent: reward for agent, reward in rewards.items() if reward is not None} if others else {}
    return Played(Score(first, metrics, agent_rewards=apart), last_words=_last_words(ours[0]))


def _reward(trace: Any) -> float | None:
    """The weighted sum of a trace's rewards; None if one of them, or all, were not given."""
    rewards = list(trace.rewards.values())
    return None if not rewards or None in rewards else float(sum(reward.value for reward in rewards))


def _metrics(trace: Any) -> dict[str, float]:
    found = {f"reward_{name}": reward.score for name, reward in trace.rewards.items() if reward is not None}
    found |= {name: value for name, value in trace.metrics.items() if value is not None}
    return {name: float(value) for name, value in found.items()} | {"verifiers_turns": float(trace.num_turns)}


def _last_words(trace: Any) -> str:
    said = [node.message.content for node in trace.nodes if node.sampled]
    return said[-1] if said and isinstance(said[-1], str) else ""


def _load_env(vf: Any, options: VerifiersOptions) -> Any:
    """The environment that verifiers makes of the options. Raises ConfigError."""
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    # verifiers finds a harness by the name of a module.
    sys.modules.setdefault(CHAT, importlib.import_module("agentrl_environments.verifiers.chat"))
    table = dict(options.env)
    taskset = table.get("taskset", {}).get("id")
    if not taskset:
        raise ConfigError("options.env names no taskset; set options.env.taskset.id")
    try:
        loaders.import_taskset(taskset)
        kind = loaders.env_config_type(taskset, table.get("id", ""))
        return loaders.load_environment(loaders.resolve_env_config(with_defaults(vf, kind, taskset, table)))
    except ModuleNotFoundError as error:
        shipped = sorted(module.stem for module in _tasksets())
        raise ConfigError(
            f"options.env: {error}; verifiers brings the tasksets {', '.join(shipped)}, and another's package is to be "
            f"installed in {sys.executable}"
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"options.env is not what verifiers takes for taskset {taskset}: {error}") from error


def _tasksets() -> Iterator[Path]:
    folder = Path(importlib.import_module("verifiers.v1.tasksets").__path__[0])
    return (path for path in folder.iterdir() if (path / "__init__.py").is_file())


def with_defaults(vf: Any, kind: Any, taskset: str, table: dict[str, Any]) -> dict[str, Any]:
    """The table, in which roles that say nothing of it get the chat loop of this process, and no sandbox.

    Raises:
        ConfigError: something is to be retried by verifiers, which would leave a failed attempt in the episode.
    """
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    filled, brings_harness = dict(table), loaders.default_harness_id(taskset) == taskset
    for name, field in kind.model_fields.items():
        if not isinstance(field.default, vf.AgentConfig):
            continue
        role, said = dict(table.get(name, {})), field.default.model_fields_set
        if "runtime" not in role and "runtime" not in said:
            role["runtime"] = {"type": "subprocess"}
        if "harness" not in role and "harness" not in said and not brings_harness:
            role["harness"] = {"id": CHAT}
        filled[name] = role
    for name, part in [("", filled), *filled.items()]:
        if isinstance(part, dict) and part.get("retries"):
            where = ".".join(filter(None, ("options.env", name, "retries")))
            raise ConfigError(
                f"{where}: a failed attempt would stay in the episode; the run plays its task anew by itself"
            )
    return filled
