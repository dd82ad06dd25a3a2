"""Reads TOML recipes and ``key.path=value`` overrides into one table of plain values."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentrl.types.errors import ConfigError


def load_table(recipe: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The recipe's table with overrides laid over it, in order.

    An override is ``key.path=value``; the value is read as TOML and, where it is none, as a string.

    Example: ``load_table(path, ["trainer.optimizer.learning_rate=1e-6", "name=second"])``.

    Raises:
        ConfigError: the file is missing or no TOML, or an override is malformed.
    """
    try:
        table = tomllib.loads(recipe.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"no recipe at {recipe}; a recipe is a TOML file, or the name of one that an environment ships, such as "
            "sql/demo"
        ) from None
    except (OSError, ValueError) as error:  # of TOML and of text, too
        raise ConfigError(f"{recipe} is not a TOML file: {error}; correct it, or give another") from None
    for override in overrides:
        _apply(table, override)
    return table


def _apply(table: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form key.path=value")
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: '{key}' is a value, not a section")
    table[keys[-1]] = _parse_value(text.strip())


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
