"""Finds a recipe by path, or by the name of the environment that ships it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[
    Path, typer.Argument(help="TOML recipe: a file, or one that an environment ships, such as sql/demo.")
]
OverridesArgument = Annotated[list[str] | None, typer.Argument(help="key.path=value, laid over the recipe in order.")]


def find_recipe(given: Path) -> Path:
    """The file at a path, or the one that ``ENVIRONMENT/NAME`` names; a path that is neither is returned as it is.

    Example: ``sql/demo`` is ``demo.toml`` beside the environment ``sql``, wherever that is installed.

    Raises:
        ConfigError: there is such an environment, but it ships no such recipe.
    """
    from agentrl import registry

    environment, _, name = str(given).partition("/")
    known = {plugin.name for plugin in registry.list_plugins(registry.ENVIRONMENTS)}
    if os.path.exists(given) or not name or "/" in name or environment not in known:
        return given
    return registry.shipped_file(registry.ENVIRONMENTS, environment, f"{name.removesuffix('.toml')}.toml")
