"""``agentrl engine``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.errors import reported
from agentrl.cli.extras import needs
from agentrl.process.parent import die_with_parent, ignore_stop_signals
from agentrl.types.errors import ConfigError


@reported
@needs("train")
def engine(
    model: Annotated[Path, typer.Argument(help="Folder with config.json and safetensors weights.")],
    port: Annotated[int, typer.Option(help="TCP port to listen on.")],
    host: Annotated[str, typer.Option(help="Address to listen on; anything but loopback needs --token.")] = "127.0.0.1",
    token: Annotated[str | None, typer.Option(help="Bearer token that control endpoints ask for.")] = None,
    token_variable: Annotated[str | None, typer.Option(help="Environment variable that has the token.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, float64 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    threads: Annotated[int, typer.Option(help="Processor cores for arithmetic.")] = 1,
    max_running_requests: Annotated[int, typer.Option(help="Requests that generate at once.")] = 64,
    context_length: Annotated[int | None, typer.Option(help="Longest prompt plus reply; default: the model's.")] = None,
    prefill_tokens: Annotated[int, typer.Option(help="Prompt tokens that one step may process.")] = 4096,
    long_step_s: Annotated[float, typer.Option(help="Steps of so many seconds leave calls free.")] = 0.1,
    hung_step_s: Annotated[float, typer.Option(help="A longer step, in seconds, makes /health fail.")] = 300.0,
    weight_version: Annotated[str, typer.Option(help="Label of the first weights.")] = "default",
    max_lora_rank: Annotated[int, typer.Option(help="Largest rank of a LoRA adapter.")] = 64,
    collective_s: Annotated[float, typer.Option(help="Seconds that a broadcast of weights may take.")] = 120.0,
    deterministic: Annotated[bool, typer.Option(help="Results that do not depend on batching, in float64.")] = False,
    supervised: Annotated[bool, typer.Option(help="End when the process that started this one ends.")] = False,
) -> None:
    """Serve a model over SGLang's native protocol until interrupted."""
    if supervised:
        ignore_stop_signals()
        die_with_parent()
    if token_variable is not None:
        token = _token_of(token_variable, token)
    own = ("supervised", "token_variable")
    values: dict[str, Any] = {key: value for key, value in locals().items() if key not in (*own, "own")}
    from agentrl.engine.options import parse_engine_options
    from agentrl.orchestration.model_files import read_model_files

    options = parse_engine_options(values, "agentrl engine")
    read_model_files(model)
    from agentrl.engine.main import run_engine

    def say(address: str) -> None:
        if not supervised:
            typer.echo(f"serving {model} at {address}; Ctrl-C ends it")

    run_engine(options, supervised, say)


def _token_of(variable: str, given: str | None) -> str:
    """The token that a variable has; programs that this process starts do not inherit it. Raises ConfigError."""
    if given is not None:
        raise ConfigError("agentrl engine: --token and --token-variable both name a token; give one of them")
    if not (token := os.environ.pop(variable, "")):
        raise ConfigError(
            f"agentrl engine: --token-variable: the variable {variable} is not set; put the token into it"
        )
    return token
