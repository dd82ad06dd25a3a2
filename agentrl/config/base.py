"""The base of every configuration class: frozen, no unknown keys, errors that name the remedy."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from agentrl.types.errors import ConfigError

M = TypeVar("M", bound="ConfigModel")


class ConfigModel(BaseModel):
    """A configuration section. Fields carry meaning, unit and when to change them below themselves."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def parse_config(kind: type[M], values: dict[str, Any], source: str) -> M:
    """Build `kind` from plain values.

    Raises:
        ConfigError: a key is unknown or a value does not fit; names `source`, key and remedy.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        lines = [_explain(kind, entry) for entry in error.errors()]
        raise ConfigError(f"{source}: " + "; ".join(lines)) from None


def _explain(kind: type[ConfigModel], entry: ErrorDetails) -> str:
    path = ".".join(str(part) for part in entry["loc"])
    if entry["type"] != "extra_forbidden":
        return f"{path or 'configuration'}: {entry['msg']} (got {entry['input']!r})"
    known = _known_keys(kind, entry["loc"][:-1])
    near = difflib.get_close_matches(str(entry["loc"][-1]), known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known keys here: {', '.join(sorted(known))}"
    return f"unknown key '{path}'; {hint}"


def _known_keys(kind: type[ConfigModel], path: tuple[int | str, ...]) -> list[str]:
    """Field names of the section that `path` leads to; all names met on the way where it forks."""
    sections: list[type[ConfigModel]] = [kind]
    for part in path:
        fields = [s.model_fields[part].annotation for s in sections if part in s.model_fields]
        if fields:
            sections = [model for annotation in fields for model in _models_in(annotation)]
    return [name for section in sections for name in section.model_fields]


def _models_in(annotation: object) -> list[type[ConfigModel]]:
    """Configuration classes named anywhere in a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        return [annotation]
    return [model for inner in getattr(annotation, "__args__", ()) for model in _models_in(inner)]
