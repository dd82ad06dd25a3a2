"""Reads TOML recipes and ``key.path=value`` overrides into one table of plain values."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentrl.types.errors import ConfigError


def load_table(recipe: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The recipe's table with overrides laid over it, in order.

    An override is ``key.path=value``; the value is read as TOML and, where it is none, as a string. In a list of
    tables (``[[environment.scorers]]``) the next key is the `name` of one of them.

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
    section = ""
    found: Any = table
    for key in keys[:-1]:
        below = _named(found, key, override, section) if isinstance(found, list) else found.setdefault(key, {})
        if not isinstance(below, dict | list):
            raise ConfigError(f"override {override!r}: '{key}' is a value, not a section")
        section, found = key, below
    if isinstance(found, list):
        raise ConfigError(
            f"override {override!r}: '{section}' is a list; name a key of one of its tables, or set it all"
        )
    found[keys[-1]] = _parse_value(text.strip())


def _named(tables: list[Any], name: str, override: str, section: str) -> Any:
    """The table of a list that has this name. Raises ConfigError."""
    by_name = {table["name"]: table for table in tables if isinstance(table, dict) and "name" in table}
    if name not in by_name:
        known = ", ".join(map(str, by_name)) or "none with a name"
        raise ConfigError(f"override {override!r}: no '{name}' in {section}; there is {known}")
    return by_name[name]


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
