"""How a policy's conversations become tokens."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from agentrl.config.base import ConfigModel


class ChatConfig(ConfigModel):
    """The chat format of a policy."""

    renderer: str = "auto"
    """``auto`` to choose by what is in the model's folder (``agentrl model check`` says what that is), ``template`` for
    the model's own chat template, the name of a renderer of the `renderers` package, or ``module:Class`` of one's own
    for a model whose template has no tools."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the renderer or variables of the template, such as ``enable_thinking``; passed through as they are."""
    history: Literal["exact", "template"] = "exact"
    """Whether earlier replies stay exactly as sampled, or are rewritten as the model's template would
    (which drops old thinking): the latter opens a branch of the episode whenever it happens."""
