"""The configuration of a run: every component's section, put together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.buffer.config import BufferConfig
from agentrl.config.base import ConfigModel, parse_config
from agentrl.config.loading import load_table
from agentrl.envs.config import EnvironmentConfig
from agentrl.inference.config import ClientConfig, EmbeddedEngineConfig, EngineConfig, FleetConfig
from agentrl.journal.config import JournalConfig
from agentrl.rollouts.config import RolloutConfig, ScaffoldConfig
from agentrl.tokens.config import ChatConfig
from agentrl.trainer.config import TrainerConfig
from agentrl.weights.config import AdapterTransportConfig, PublishConfig


class PolicyConfig(ConfigModel):
    """One policy: its first weights, and what serves and trains it."""

    model: Path
    """Folder with config.json, safetensors weights and tokenizer.json."""
    chat: ChatConfig = ChatConfig()
    """How conversations become tokens."""
    engine: EngineConfig = EmbeddedEngineConfig()
    """What serves the policy."""
    client: ClientConfig = ClientConfig()
    """Deadlines of calls to its engines."""
    fleet: FleetConfig = FleetConfig()
    """When an engine counts as lost."""
    trainer: TrainerConfig = TrainerConfig()
    """What trains it."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """How rewards become a gradient."""
    publish: PublishConfig = PublishConfig()
    """How its weights reach the engines."""

    @model_validator(mode="after")
    def _sends_what_it_trains(self) -> PolicyConfig:
        sends_adapter = isinstance(self.publish.transport, AdapterTransportConfig)
        if sends_adapter != (self.trainer.lora is not None):
            raise ValueError(
                'trainer.lora and publish.transport.kind = "adapter" belong together: adapters are all that is '
                "trained, and all that is sent"
            )
        return self


class EvaluationConfig(ConfigModel):
    """Evaluation on held-out tasks, on an engine of its own, while training goes on."""

    interval_steps: Annotated[int, Field(ge=0)] = 20
    """Steps between evaluations in flight; 0 evaluates only before and after the run."""
    tasks: Annotated[int, Field(ge=0)] = 100
    """Held-out tasks of an evaluation in flight."""
    final_tasks: Annotated[int, Field(ge=0)] = 400
    """Held-out tasks of the evaluations before the first and after the last step; 0 for none."""
    concurrency: Annotated[int, Field(gt=0)] = 32
    """Episodes at once."""

    @property
    def is_wanted(self) -> bool:
        """Whether anything is evaluated at all."""
        return self.final_tasks > 0 or (self.interval_steps > 0 and self.tasks > 0)


class CheckpointConfig(ConfigModel):
    """What a run can be resumed from."""

    interval_steps: Annotated[int, Field(gt=0)] = 50
    """Steps between checkpoints; a resumed run redoes the steps since the last, from the journal."""
    keep: Annotated[int, Field(gt=0)] = 2
    """Checkpoints that stay on disk."""


class RunConfig(ConfigModel):
    """A training run. A recipe is a TOML file of these sections."""

    name: str
    """Name of the run's folder, with the seed behind it."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of tasks and sampling."""
    steps: Annotated[int, Field(gt=0)]
    """Optimizer steps."""
    runs_folder: Path = Path("runs")
    """Where run folders are made."""
    policies: Annotated[dict[str, PolicyConfig], Field(min_length=1)]
    """Policies by name; most runs have one, called main."""
    environment: EnvironmentConfig
    """What is played."""
    scaffold: ScaffoldConfig = ScaffoldConfig()
    """What makes an agent of the policy."""
    rollout: RolloutConfig = RolloutConfig()
    """How episodes are produced."""
    buffer: BufferConfig = BufferConfig()
    """What makes a step."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When and on what the policy is evaluated."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run is saved."""
    journal: JournalConfig = JournalConfig()
    """What is on record between checkpoints."""

    @model_validator(mode="after")
    def _plays_one_policy(self) -> RunConfig:
        if len(self.policies) > 1:
            raise ValueError(
                f"policies {sorted(self.policies)}: the scaffold '{self.scaffold.name}' has one agent, which can "
                "act by one policy; keep one"
            )
        return self

    @property
    def is_deterministic(self) -> bool:
        """Whether engines are asked for results that do not depend on timing: with staleness 0."""
        return self.buffer.max_staleness == 0


def load_run_config(recipe: Path, overrides: Iterable[str]) -> RunConfig:
    """A recipe with overrides as a checked configuration. Raises ConfigError."""
    table = load_table(recipe, overrides)
    return parse_config(RunConfig, table, str(recipe))
