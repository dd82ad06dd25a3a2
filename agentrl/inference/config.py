"""Where a policy's engines come from, and how long calls to them may take."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from agentrl.config.base import ConfigModel


class ClientConfig(ConfigModel):
    """How long calls to an engine may take."""

    generate_s: float = 300.0
    """Seconds for one reply, pauses included; raise it for very long replies."""
    control_s: float = 10.0
    """Seconds for pause, resume, a receipt or a look at the state."""
    load_s: float = 120.0
    """Seconds for loading weights; raise it with the model's size."""
    connect_s: float = 5.0
    """Seconds to reach the engine at all."""


class FleetConfig(ConfigModel):
    """When an engine counts as lost, and how long work waits for one."""

    probe_s: Annotated[float, Field(gt=0)] = 2.0
    """Seconds between two looks at an engine."""
    suspect_s: Annotated[float, Field(gt=0)] = 5.0
    """Seconds without an answer after which an engine gets no new requests; raise it on crowded machines."""
    dead_s: Annotated[float, Field(gt=0)] = 20.0
    """Seconds without an answer after which its requests go elsewhere and it is started anew."""
    wait_s: Annotated[float, Field(gt=0)] = 180.0
    """Seconds that a request, or a publication, waits while no engine serves; at least as long as an engine may take to
    come back (engine.start_s)."""


class EmbeddedEngineConfig(ConfigModel):
    """Engines that the run starts on this machine."""

    kind: Literal["embedded"] = "embedded"
    """Started by the run."""
    count: Annotated[int, Field(gt=0)] = 1
    """Engine processes of the policy."""
    threads: Annotated[int, Field(gt=0)] = 1
    """Processor cores for the arithmetic of each."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further options of ``agentrl engine`` (``agentrl engine --help``), passed through as they are."""
    start_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds for an engine to load its model."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often each engine is started anew after it died; 0 goes on with those that are left."""


class SGLangEngineConfig(ConfigModel):
    """SGLang servers that the run starts on this machine.

    Their draws do not repeat: with `buffer.max_staleness` 0 a run is synchronous, and not the same twice.
    """

    kind: Literal["sglang"]
    """Started by the run."""
    count: Annotated[int, Field(gt=0)] = 1
    """Servers of the policy."""
    command: Annotated[list[str], Field(min_length=1)] = ["python", "-m", "sglang.launch_server"]
    """What starts one; another interpreter, where SGLang has an environment of its own."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further options of the command, passed through as they are, such as ``tp-size = 2``."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the servers, beside the run's own."""
    devices: list[str] = Field(default_factory=list)
    """CUDA_VISIBLE_DEVICES of one server after the other, the evaluation's last; empty leaves it alone."""
    start_s: Annotated[float, Field(gt=0)] = 900.0
    """Seconds for a server to load its model and to warm up."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often each server is started anew after it died; 0 goes on with those that are left."""


class AttachedEngineConfig(ConfigModel):
    """Engines that run already, SGLang or embedded; a run brings them its first weights before it uses them.

    A run takes an engine by a mark in the label of its weights, which it removes when it ends. An engine with another
    run's mark is refused; a run that is resumed knows its own.
    With `publish.transport.kind = "adapter"` they must hold the base weights already, which is proven.
    """

    kind: Literal["attached"] = "attached"
    """Found running."""
    urls: Annotated[list[str], Field(min_length=1)]
    """Base addresses, such as ``http://10.0.0.5:30000``."""
    token_variable: str | None = None
    """Environment variable with the engines' bearer token."""
    start_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds for the engines to answer, at the start and after they were lost."""
    take_over: str | None = None
    """Mark of a run that was killed and will not be resumed: engines that still bear it are taken. The refusal of such
    an engine says what to put here."""

    @field_validator("urls")
    @classmethod
    def _are_addresses(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not re.fullmatch(r"https?://[^\s/]+(/.*)?", url):
                raise ValueError(f"'{url}' is no address: give one such as http://10.0.0.5:30000")
        if len(set(urls)) < len(urls):
            raise ValueError("an address is named twice: name each engine once")
        return urls


StartedEngineConfig = EmbeddedEngineConfig | SGLangEngineConfig
EngineConfig = Annotated[StartedEngineConfig | AttachedEngineConfig, Field(discriminator="kind")]
