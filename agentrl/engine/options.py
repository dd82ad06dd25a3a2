"""What an embedded engine is started with."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from agentrl.config.base import ConfigModel, parse_config
from agentrl.process.ports import is_loopback
from agentrl.types.errors import ConfigError


class UpdateOptions(ConfigModel):
    """How an engine takes new weights."""

    weight_version: str = "default"
    """Label of the weights in the model folder."""
    max_lora_rank: Annotated[int, Field(ge=1)] = 64
    """Largest rank of a LoRA adapter; larger ones are refused. Raise it if adapters of that rank are trained."""
    collective_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that a broadcast group has to form, and that each bucket may take; raise it for slow links."""


class StepOptions(ConfigModel):
    """How an engine steps."""

    prefill_tokens: Annotated[int, Field(ge=1)] = 4096
    """Prompt tokens that one step may process; smaller keeps replies to other callers flowing."""
    long_step_s: Annotated[float, Field(ge=0)] = 0.1
    """Steps of at least so many seconds are computed in a thread, while calls are answered; 0: all steps.

    Shorter ones are cheaper on the event loop, where calls wait for their end. Lower it if calls must not wait.
    """
    hung_step_s: Annotated[float, Field(gt=0)] = 300.0
    """A longer step, in seconds, makes ``/health`` return 503, so that a supervisor restarts the engine.

    Raise it where a long prompt takes longer.
    """


class EngineOptions(ConfigModel):
    """Options of ``agentrl engine``."""

    model: Path
    """Folder with config.json and safetensors weights."""
    port: Annotated[int, Field(ge=0, le=65535)]
    """TCP port to listen on."""
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs a token."""
    token: Annotated[str | None, Field(min_length=1)] = None
    """Bearer token that control endpoints ask for."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Precision of weights and arithmetic."""
    device: str = "cpu"
    """Torch device."""
    threads: Annotated[int, Field(ge=1)] = 1
    """Processor cores for arithmetic; leave some for trainer and rollouts."""
    max_running_requests: Annotated[int, Field(ge=1)] = 64
    """Requests that generate at once; the rest queue. Each takes a row of the KV cache."""
    context_length: Annotated[int, Field(ge=1)] | None = None
    """Longest prompt plus reply in tokens; the model's own limit if not given."""
    steps: StepOptions = StepOptions()
    """What one step computes, and where."""
    updates: UpdateOptions = UpdateOptions()
    """Versions, adapters and broadcasts."""
    deterministic: bool = False
    """Results independent of batching: float64 arithmetic, rounded log-probabilities."""

    @field_validator("host")
    @classmethod
    def _is_address(cls, host: str) -> str:
        if host != "localhost":
            ipaddress.ip_address(host)
        return host

    @model_validator(mode="after")
    def _needs_token_off_loopback(self) -> EngineOptions:
        if not is_loopback(self.host) and self.token is None:
            raise ValueError(f"host {self.host} can be reached by others; give --token, or listen on 127.0.0.1")
        return self


def parse_engine_options(values: Mapping[str, Any], source: str) -> EngineOptions:
    """Options by their names on the command line, without the sections that they are in.

    Raises:
        ConfigError: one is unknown, or its value does not fit; names `source` and option.
    """
    sections = {"steps": StepOptions.model_fields.keys(), "updates": UpdateOptions.model_fields.keys()}
    inner = {name: section for section, names in sections.items() for name in names}
    known = {*EngineOptions.model_fields, *inner} - sections.keys()
    nested: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean '{near[0]}'?" if near else "`agentrl engine --help` lists them"
            raise ConfigError(f"{source}: unknown option '{name}'; {hint}")
        place = nested.setdefault(inner[name], {}) if name in inner else nested
        place[name] = value
    return parse_config(EngineOptions, nested, source)
