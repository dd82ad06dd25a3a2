"""The configuration of a warm start."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.base import ConfigModel, parse_config
from agentrl.config.loading import load_table
from agentrl.envs.config import EnvironmentConfig
from agentrl.rollouts.config import LimitsConfig, ScaffoldConfig
from agentrl.sandbox.config import SandboxConfig
from agentrl.tokens.config import ChatConfig
from agentrl.trainer.config import ModelShape, TrainerConfig
from agentrl.types.errors import ConfigError


class MadeModel(ConfigModel):
    """A small model of random weights, with a tokenizer that another model has or that is made from transcripts."""

    kind: Literal["made"] = "made"
    """Made on the spot."""
    shape: ModelShape = ModelShape()
    """Its size."""
    tokenizer: Path | None = None
    """Folder of a model whose tokenizer and chat template it takes, vocabulary_tokens or not: a student needs those of
    its teacher. Without a value they are made, from transcripts of the last lesson's expert, and no two seeds have
    the same."""


class FolderModel(ConfigModel):
    """A model that exists as a folder made by ``save_pretrained``."""

    kind: Literal["folder"]
    """Read from a folder."""
    path: Path
    """The folder."""


class GgufModel(ConfigModel):
    """A model that an installed Python package carries as a GGUF file."""

    kind: Literal["gguf"]
    """Converted from GGUF."""
    package: str
    """Import name of the package."""
    file: str
    """Name of the file in it."""


FirstModel = Annotated[MadeModel | FolderModel | GgufModel, Field(discriminator="kind")]


class LessonConfig(ConfigModel):
    """Who is imitated, and for how long."""

    expert: str
    """Expert of the environment whose episodes are learned from; it plays all agents."""
    agent: str | None = None
    """The agent whose turns are learned, where several act; without a value those of all."""
    transcripts: Annotated[int, Field(gt=0)] = 8192
    """Episodes that the expert plays; steps go through them again and again."""
    max_steps: Annotated[int, Field(gt=0)] = 500
    """Steps at most; the learning rate is constant, but for the fall at the end of the last lesson."""
    enough_nats: float | None = None
    """The lesson ends early once an unseen episode of the expert costs at most this at two checks in a row. Only
    experts without chance have a cost that goes to zero; without a value all steps are taken."""


class WarmStartConfig(ConfigModel):
    """A warm start: supervised learning from an expert's episodes. A recipe is a TOML file of this."""

    output: Path
    """Folder for the model; must not exist."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of weights and tasks."""
    model: FirstModel = MadeModel()
    """Where the first weights come from."""
    environment: EnvironmentConfig
    """What is played."""
    sandbox: SandboxConfig = SandboxConfig()
    """Sandboxes of an environment that asks for some."""
    scaffold: ScaffoldConfig = ScaffoldConfig()
    """What makes an agent of the expert."""
    limits: LimitsConfig = LimitsConfig()
    """What an episode may use."""
    chat: ChatConfig = ChatConfig()
    """How conversations become tokens."""
    lessons: list[LessonConfig] = Field(default_factory=list)
    """Taken one after the other: skills first, habits later. Without any the model is only written to `output`."""
    check_episodes: Annotated[int, Field(gt=0)] = 64
    """Unseen episodes that measure what a lesson has taught."""
    episodes_per_step: Annotated[int, Field(gt=0)] = 32
    """Episodes of one optimizer step."""
    decay_steps: Annotated[int, Field(gt=0)] = 150
    """Steps at the end of the last lesson in which the learning rate falls linearly to a twentieth."""
    trainer: TrainerConfig = TrainerConfig()
    """What trains it."""


def load_warmstart_config(recipe: Path, overrides: Iterable[str]) -> WarmStartConfig:
    """A recipe with overrides as a checked configuration. Raises ConfigError."""
    overrides = list(overrides)
    table = load_table(recipe, overrides)
    if "policies" in table:
        raise ConfigError(f"{recipe} is a recipe of a training run: `agentrl train {recipe}` takes it")
    return parse_config(WarmStartConfig, table, str(recipe), overrides)
