"""``agentrl scaffold``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.errors import reported

scaffolds = typer.Typer(help="Scaffolds.", no_args_is_help=True, rich_markup_mode=None)


@scaffolds.callback()
def main() -> None:
    """Scaffolds."""


@scaffolds.command("list")
@reported
def list_scaffolds() -> None:
    """List what is installed, without importing any of it."""
    from agentrl import registry

    for plugin in registry.list_plugins(registry.SCAFFOLDS):
        typer.echo(f"{plugin.name:<20} {plugin.target:<50} {plugin.distribution}")


@scaffolds.command("init")
@reported
def init(
    name: Annotated[str, typer.Argument(help="Name of the new package.")],
    folder: Annotated[Path, typer.Option(help="Where its folder is made.")] = Path(),
) -> None:
    """Make a working scaffold with its tests, to go on from."""
    from agentrl.cli.starting import make_package

    for file in make_package("scaffold", name, folder):
        typer.echo(file)
