"""What a recipe says of a taskset of verifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from agentrl_environments.packages import PackagedOptions


class RolloutOptions(PackagedOptions):
    """The policy's chat format, which verifiers renders by itself, and what becomes of tasks and traces."""

    model: Path
    """Folder with the policy's tokenizer, the ``policies.NAME.model`` of the recipe."""
    renderer: str
    """The policy's ``chat.renderer``, by its name in the `renderers` package, such as ``qwen3``."""
    renderer_options: dict[str, Any] = Field(default_factory=dict)
    """The policy's ``chat.options``, for a policy that has some."""
    heldout_every: Annotated[int, Field(ge=2)] = 5
    """In the taskset's order, one of so many tasks is held out; raise it for a small taskset."""
    traces: Path | None = None
    """Folder for verifiers' own record of each episode, ``EPISODE.json``; for its tools, or to compare."""


class VerifiersOptions(RolloutOptions):
    """Which taskset of verifiers 0.4, and how verifiers plays it.

    Example: ``{"env": {"taskset": {"id": "gsm8k"}}, "model": "models/student", "renderer": "qwen3"}``.
    """

    env: dict[str, Any]
    """The table ``[env]`` of a configuration of verifiers, with ``taskset.id`` at least. A role of which it says
    nothing plays by a chat loop in this process, without a sandbox; name a harness and a runtime for one that runs
    code."""


class LegacyOptions(RolloutOptions):
    """Which environment of verifiers before 0.4.

    Example: ``{"id": "wordle", "model": "models/student", "renderer": "qwen3"}``.
    """

    id: str
    """The environment's package, as `load_environment` of verifiers takes it; installed beside verifiers."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the package's `load_environment`, such as ``max_turns``."""
