"""``agentrl env``."""

from __future__ import annotations

import typer

from agentrl.cli.errors import reported

environments = typer.Typer(help="Environments.", no_args_is_help=True, rich_markup_mode=None)


@environments.callback()
def main() -> None:
    """Environments."""


@environments.command("list")
@reported
def list_environments() -> None:
    """List what is installed, without importing any of it."""
    from agentrl import registry

    for plugin in registry.list_plugins(registry.ENVIRONMENTS):
        typer.echo(f"{plugin.name:<20} {plugin.target:<50} {plugin.distribution}")
