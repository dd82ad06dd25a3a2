"""``agentrl model``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.errors import reported
from agentrl.cli.extras import needs

model = typer.Typer(help="Models.", no_args_is_help=True, rich_markup_mode=None)


@model.callback()
def main() -> None:
    """Models."""


@model.command("check")
@reported
@needs("train")
def check(
    folder: Annotated[Path, typer.Argument(help="Folder with config.json, tokenizer.json and safetensors weights.")],
    renderer: Annotated[str, typer.Option(help="chat.renderer of the recipe that is to use it.")] = "auto",
) -> None:
    """Say what a model folder can be used for; exit code 1 if a run could not use it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from agentrl.orchestration.model_check import Level, check_model
    from agentrl.tokens.config import ChatConfig

    colours = {Level.GOOD: "green", Level.NOTE: "yellow", Level.BAD: "red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    is_usable = True
    for finding in check_model(folder, ChatConfig(renderer=renderer)):
        is_usable = is_usable and finding.level is not Level.BAD
        table.add_row(Text(finding.level, colours[finding.level]), Text(finding.topic), Text(finding.text))
    console = Console(highlight=False)
    console.print(table)
    if not is_usable:
        typer.secho("a run cannot use this model as it is", fg="red", err=True)
        raise typer.Exit(1)
    console.print(Text("a run can use this model"))
