"""The configuration of a run: every component's section, put together."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.credit_config import credit_columns
from agentrl.buffer.config import BufferConfig
from agentrl.cluster.config import LocalRuntimeConfig, RuntimeConfig
from agentrl.config.base import ConfigModel, parse_config
from agentrl.config.loading import load_table
from agentrl.envs.config import EnvironmentConfig
from agentrl.inference.config import ClientConfig, EmbeddedEngineConfig, EngineConfig, FleetConfig
from agentrl.journal.config import JournalConfig
from agentrl.orchestration.credit_checks import check_credit, check_credit_of_samples
from agentrl.rollouts.config import LimitsConfig, RolloutConfig, SamplingConfig, ScaffoldConfig
from agentrl.sandbox.config import SandboxConfig
from agentrl.scorers.combined import CombinedConfig, in_order
from agentrl.scorers.config import ScorerConfig, VerifierConfig, check_policies
from agentrl.scorers.definition import TurnScorerConfig
from agentrl.telemetry.config import TelemetryConfig
from agentrl.tokens.config import ChatConfig
from agentrl.trainer.config import TrainerConfig
from agentrl.types.errors import ConfigError
from agentrl.weights.config import AdapterTransportConfig, PublishConfig

SOLE_AGENT = "agent"


class EvaluationScope(ConfigModel):
    """When a policy is evaluated, and on how many held-out tasks."""

    interval_steps: Annotated[int, Field(ge=0)] = 20
    """Steps between evaluations in flight; 0 evaluates only before and after the run."""
    tasks: Annotated[int, Field(ge=0)] = 100
    """Held-out tasks of an evaluation in flight."""
    final_tasks: Annotated[int, Field(ge=0)] = 400
    """Held-out tasks of the evaluations before the first and after the last step; 0 for none."""

    @property
    def is_wanted(self) -> bool:
        """Whether anything is evaluated at all."""
        return self.final_tasks > 0 or (self.interval_steps > 0 and self.tasks > 0)


class EvaluationConfig(EvaluationScope):
    """Evaluation on held-out tasks, on engines of its own, while training goes on."""

    concurrency: Annotated[int, Field(gt=0)] = 32
    """Episodes at once."""


class PolicyOverrides(ConfigModel):
    """What the run's sections say of all policies, said otherwise of one."""

    sampling: SamplingConfig | None = None
    """How its tokens are drawn, if otherwise than by rollout.sampling."""
    limits: LimitsConfig | None = None
    """Turns and tokens of its agents, if others than those of the environment."""
    buffer: BufferConfig | None = None
    """What makes a step of it, if not what [buffer] says; group_size is the run's."""
    evaluation: EvaluationScope | None = None
    """When and on how much it is evaluated, if not as [evaluation] says."""


class PolicyConfig(PolicyOverrides):
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
    frozen: bool = False
    """It acts and is never trained: an opponent or a partner. It has engines and no trainer."""

    @model_validator(mode="after")
    def _sends_what_it_trains(self) -> PolicyConfig:
        sends_adapter = isinstance(self.publish.transport, AdapterTransportConfig)
        if sends_adapter != (self.trainer.lora is not None):
            raise ValueError(
                'trainer.lora and publish.transport.kind = "adapter" belong together: adapters are all that is '
                "trained, and all that is sent"
            )
        return self


class EnvironmentSection(EnvironmentConfig):
    """One environment of a run, and how it is played."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its share of the run's groups is its weight over the sum of all."""
    scaffold: ScaffoldConfig = ScaffoldConfig()
    """What makes agents of policies."""
    agents: dict[str, str] = Field(default_factory=dict)
    """Policy of each agent that acts in it, by the agent's name. Empty: one agent, which acts by the only policy."""
    scorers: tuple[ScorerConfig, ...] = (VerifierConfig(),)
    """Who judges its episodes; the reward is the weighted sum of their scores."""
    limits: LimitsConfig | None = None
    """What an episode of it may use, if not what rollout.limits says."""
    evaluated: bool = True
    """Whether evaluations play its held-out tasks."""

    @model_validator(mode="after")
    def _is_judged(self) -> EnvironmentSection:
        names = [scorer.name for scorer in self.scorers]
        if len(set(names)) < len(names) or sum(scorer.kind == "verifier" for scorer in self.scorers) > 1:
            raise ValueError(f"scorers {names}: give each a name of its own, and have one verifier at most")
        if not any(scorer.weight for scorer in self.scorers):
            raise ValueError(f"scorers {names} weigh nothing, so no episode would have a reward: give one a weight")
        return self

    @model_validator(mode="after")
    def _combines_what_there_is(self) -> EnvironmentSection:
        names = [scorer.name for scorer in self.scorers]
        combined = [scorer for scorer in self.scorers if isinstance(scorer, CombinedConfig)]
        for scorer in combined:
            for source in scorer.sources:
                if source not in names:
                    near = difflib.get_close_matches(source, names, n=1)
                    hint = f"did you mean '{near[0]}'?" if near else f"the environment has {', '.join(names)}"
                    raise ValueError(f"scorer '{scorer.name}' is made of '{source}', which is no scorer here; {hint}")
        in_order(combined)
        return self


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
    runtime: RuntimeConfig = LocalRuntimeConfig()
    """On which machines the run's processes are: this one, or the nodes of a Ray cluster."""
    policies: Annotated[dict[str, PolicyConfig], Field(min_length=1)]
    """Policies by name; most runs have one, called main."""
    environments: Annotated[dict[str, EnvironmentSection], Field(min_length=1)]
    """What is played, by name. A run of one environment may have the sections [environment] and [scaffold] instead."""
    sandbox: SandboxConfig = SandboxConfig()
    """Sandboxes of the environments that ask for some."""
    rollout: RolloutConfig = RolloutConfig()
    """How episodes are produced."""
    buffer: BufferConfig = BufferConfig()
    """What makes a step."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When and on how much policies are evaluated."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run is saved."""
    journal: JournalConfig = JournalConfig()
    """What is on record between checkpoints."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What operators can look at: spans of episodes, and metrics for Prometheus."""

    @field_validator("name", "policies", "environments")
    @classmethod
    def _can_name_a_folder(cls, value: Any) -> Any:
        for name in [value] if isinstance(value, str) else value:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
                raise ValueError(
                    f"'{name}' cannot name a folder: take up to 100 letters, digits, '.', '_' and '-', the first of "
                    "them a letter or a digit"
                )
        return value

    @model_validator(mode="before")
    @classmethod
    def _of_one_environment(cls, values: Any) -> Any:
        """The sections [environment] and [scaffold] as an environment of its name."""
        if not isinstance(values, dict) or "environment" not in values or "environments" in values:
            return values
        rest = {key: value for key, value in values.items() if key not in ("environment", "scaffold")}
        section = values["environment"]
        if not isinstance(section, dict):
            return values
        name = str(section.get("name", "")).rpartition(":")[2] or "environment"
        scaffold = {"scaffold": values["scaffold"]} if "scaffold" in values else {}
        return {**rest, "environments": {name: {**section, **scaffold}}}

    @model_validator(mode="after")
    def _agents_have_policies(self) -> RunConfig:
        acting: set[str] = set()
        for name in self.environments:
            agents = self.agents_of(name)
            unknown = sorted(set(agents.values()) - self.policies.keys())
            if unknown:
                raise ValueError(
                    f"environments.{name}.agents: no policies {unknown}; the recipe has {', '.join(self.policies)}"
                )
            acting |= set(agents.values())
        asked = {p for scorer in self.turn_scorers() for p in scorer.uses_policies()}
        for scorer in self.turn_scorers():
            check_policies(scorer, {name: policy.frozen for name, policy in self.policies.items()})
        if idle := sorted(self.policies.keys() - acting - asked):
            raise ValueError(f"policies {idle}: no agent acts by them; name them in environments.NAME.agents")
        if not self.trained:
            raise ValueError("every policy is frozen: nothing would be trained")
        return self

    @model_validator(mode="after")
    def _corrects_tokens_of_any_age(self) -> RunConfig:
        unbounded = [name for name in self.trained if self.buffer_of(name).max_staleness == "unbounded"]
        bare = [name for name in unbounded if not self.policies[name].algorithm.is_corrected]
        if bare:
            raise ValueError(
                "buffer.max_staleness = 'unbounded' trains tokens of any age, and nothing corrects for that: "
                f"set policies.{bare[0]}.algorithm.correction.kind = 'tis' or 'icepop', or a number as "
                "buffer.max_staleness"
            )
        return self

    @model_validator(mode="after")
    def _credit_is_sound(self) -> RunConfig:
        for name in self.trained:
            credit = self.policies[name].algorithm.credit
            scorers = {
                played: [s.name for s in self.environments[played].scorers if isinstance(s, TurnScorerConfig)]
                for played in self.played_by(name)
            }
            check_credit(name, credit, scorers)
            check_credit_of_samples(name, credit, self.sampling_of(name), self.buffer_of(name))
        return self

    @model_validator(mode="after")
    def _groups_are_of_one_size(self) -> RunConfig:
        for name, policy in self.policies.items():
            if policy.buffer is not None and policy.buffer.group_size != self.buffer.group_size:
                raise ValueError(
                    f"policies.{name}.buffer.group_size {policy.buffer.group_size} is not buffer.group_size "
                    f"{self.buffer.group_size}: all policies of an episode see the same groups; set one size"
                )
        return self

    @model_validator(mode="after")
    def _forks_can_be_played(self) -> RunConfig:
        for name, policy in self.policies.items():
            if policy.buffer is not None and policy.buffer.forks != self.buffer.forks:
                raise ValueError(
                    f"policies.{name}.buffer.forks {policy.buffer.forks} is not buffer.forks {self.buffer.forks}: all "
                    "policies of an episode see the same groups; set one number"
                )
        if not self.buffer.forks:
            return self
        if self.journal.kind == "none":
            raise ValueError(
                f"buffer.forks {self.buffer.forks}: forks go on from what the journal has of their parent, and "
                "journal.kind is 'none'; set it to 'segments', or buffer.forks to 0"
            )
        for name in self.environments:
            if len(self.agents_of(name)) > 1:
                raise ValueError(
                    f"buffer.forks {self.buffer.forks}: several agents act in environments.{name}, and only episodes "
                    "of one agent can be forked; set buffer.forks to 0"
                )
        return self

    @property
    def trained(self) -> tuple[str, ...]:
        """Policies that are not frozen."""
        return tuple(name for name, policy in self.policies.items() if not policy.frozen)

    def agents_of(self, environment: str) -> dict[str, str]:
        """Policy of each agent that acts in an environment. Raises ValueError if several might."""
        if agents := self.environments[environment].agents:
            return agents
        asked = {policy for scorer in self.turn_scorers() for policy in scorer.uses_policies()}
        # A frozen policy that a scorer asks acts only where it is said to.
        acting = [name for name, policy in self.policies.items() if name not in asked or not policy.frozen]
        if len(acting) != 1:
            raise ValueError(
                f"environments.{environment}.agents is missing: it says which agent acts by which of the policies "
                f"{', '.join(self.policies)}"
            )
        return {SOLE_AGENT: acting[0]}

    @property
    def acting(self) -> tuple[str, ...]:
        """Policies that some agent acts by; the others are asked by scorers alone."""
        acting = {policy for name in self.environments for policy in self.agents_of(name).values()}
        return tuple(name for name in self.policies if name in acting)

    def turn_scorers(self) -> list[TurnScorerConfig]:
        """The scorers of turns of all environments."""
        sections = self.environments.values()
        return [scorer for section in sections for scorer in section.scorers if isinstance(scorer, TurnScorerConfig)]

    def required_scorers(self, environment: str) -> tuple[str, ...]:
        """Scorers that an episode must have heard of: a reward or a credit goes by them, or their `late` says so."""
        scorers = self.environments[environment].scorers

        def is_required(scorer: ScorerConfig) -> bool:
            return bool(scorer.weight) or (isinstance(scorer, TurnScorerConfig) and scorer.late != "outcome_only")

        credits = (self.policies[policy].algorithm.credit for policy in self.trained_in(environment))
        needed = {s.name for s in scorers if is_required(s)} | {credit_columns(credit).scorer for credit in credits}
        for combined in reversed(in_order(s for s in scorers if isinstance(s, CombinedConfig))):
            needed |= set(combined.sources) if combined.name in needed else set()
        return tuple(scorer.name for scorer in scorers if scorer.name in needed)

    def trained_in(self, environment: str) -> tuple[str, ...]:
        """Policies that are trained on an environment's episodes."""
        acting = set(self.agents_of(environment).values())
        return tuple(name for name in self.trained if name in acting)

    def played_by(self, policy: str) -> tuple[str, ...]:
        """Environments on whose episodes a policy is trained."""
        return tuple(name for name in self.environments if policy in self.trained_in(name))

    def buffer_of(self, policy: str) -> BufferConfig:
        """What makes a step of a policy."""
        return self.policies[policy].buffer or self.buffer

    def sampling_of(self, policy: str) -> SamplingConfig:
        """How a policy's tokens are drawn."""
        return self.policies[policy].sampling or self.rollout.sampling

    def evaluation_of(self, policy: str) -> EvaluationScope:
        """When and on how much a policy is evaluated."""
        return self.policies[policy].evaluation or self.evaluation

    def is_evaluated(self, policy: str) -> bool:
        """Whether a policy is evaluated at all."""
        is_played = any(self.environments[name].evaluated for name in self.played_by(policy))
        return is_played and self.evaluation_of(policy).is_wanted

    def limits_of(self, environment: str) -> LimitsConfig:
        """What an episode of an environment may use."""
        return self.environments[environment].limits or self.rollout.limits

    @property
    def is_deterministic(self) -> bool:
        """Whether engines are asked for results that do not depend on timing: with staleness 0."""
        return all(self.buffer_of(policy).max_staleness == 0 for policy in self.trained)


def chosen_policy(config: RunConfig, name: str | None) -> str:
    """The trained policy of a name, or the only one. Raises ConfigError."""
    names = ", ".join(config.trained)
    if name is None and len(config.trained) > 1:
        raise ConfigError(f"the run trains {names}: say which with --policy")
    if name is not None and name not in config.trained:
        raise ConfigError(f"no trained policy '{name}'; there are {names}")
    return name or config.trained[0]


def load_run_config(recipe: Path, overrides: Iterable[str]) -> RunConfig:
    """A recipe with overrides as a checked configuration. Raises ConfigError."""
    overrides = list(overrides)
    table = load_table(recipe, overrides)
    # How a run is submitted (agentrl.jobs.config) is no part of what it is.
    table.pop("job", None)
    if "policies" not in table and "lessons" in table:
        raise ConfigError(f"{recipe} is a recipe of a warm start: `agentrl warmstart {recipe}` takes it")
    return parse_config(RunConfig, table, str(recipe), overrides)
