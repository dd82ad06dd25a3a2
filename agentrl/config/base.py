"""The base of every configuration class: frozen, no unknown keys, errors that name the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from agentrl.types.errors import ConfigError

M = TypeVar("M", bound="ConfigModel")
_MAX_SHOWN = 60  # characters of a wrong value
_NEAR = 0.65  # similarity from which on another key may have been meant


class ConfigModel(BaseModel):
    """A configuration section. Fields carry meaning, unit and when to change them below themselves.

    Where a section is one of several kinds, its kind alone may stand for it: ``transport = "delta"`` is
    ``transport = {kind = "delta"}``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _kinds_by_name(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: {"kind": value} if cls._is_kind(key, value) else value for key, value in values.items()}

    @classmethod
    def _is_kind(cls, key: str, value: object) -> bool:
        """Whether a text stands where only sections with a kind are taken."""
        field = cls.model_fields.get(key)
        return isinstance(value, str) and field is not None and field.discriminator == "kind"


def parse_config(kind: type[M], values: dict[str, Any], source: str, overrides: Sequence[str] = ()) -> M:
    """Build `kind` from plain values.

    Raises:
        ConfigError: a key is unknown or a value does not fit; names `source`, or which of the `overrides` laid over
            it has the value, then key and remedy.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        found: dict[str, list[str]] = {}
        for entry in error.errors():
            found.setdefault(_origin(entry["loc"], source, overrides), []).append(_explain(kind, entry))
        lines = [f"{origin}: {'; '.join(faults)}" for origin, faults in found.items()]
        raise ConfigError("; ".join(lines)) from None


def _origin(path: tuple[int | str, ...], source: str, overrides: Sequence[str]) -> str:
    """What gave the value at a path: the last override that touches it, or else the source."""
    for override in reversed(overrides):
        keys = override.partition("=")[0].strip().split(".")
        # A path names the kind of a section as well, which no key does.
        rest = iter(str(part) for part in path)
        if path and all(key in rest for key in keys):
            return f"override '{override}'"
    return source


def _explain(kind: type[ConfigModel], entry: ErrorDetails) -> str:
    path = ".".join(str(part) for part in entry["loc"])
    if entry["type"] == "extra_forbidden":
        return f"unknown key '{path}'; {_hint(kind, entry['loc'])}"
    message = entry["msg"].removeprefix("Value error, ")
    if entry["type"] == "missing":
        return f"{path} is missing"
    if entry["type"] == "union_tag_not_found":
        return f"{path}.kind is missing; give one of {', '.join(_kinds(kind, entry['loc']))}"
    # What a rule over several values was given is the whole section; the message names what it is about.
    got = "" if isinstance(entry["input"], dict | ConfigModel) else f" (got {_shortened(entry['input'])})"
    return f"{path}: {message}{got}" if path else f"{message}{got}"


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _hint(kind: type[ConfigModel], path: tuple[int | str, ...]) -> str:
    """The key that may have been meant: of the same section, else one that lies deeper, else a similar one."""
    wrong, known = str(path[-1]), _known_keys(kind, path[:-1])
    below = [f"{key}.{name}" for key in known for name in _names_below(kind, (*path[:-1], key))]
    for key in [*known, *below]:
        name = key.rpartition(".")[2]
        if wrong in (name, "".join(word[0] for word in name.split("_") if "_" in name)):
            return f"did you mean '{key}'?"
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=_NEAR)
    return f"did you mean '{near[0]}'?" if near else f"known keys here: {', '.join(sorted(known))}"


def _names_below(kind: type[ConfigModel], path: tuple[int | str, ...], depth: int = 2) -> list[str]:
    """Dotted names of the keys below a section, as deep as is asked for."""
    found = []
    for name in _known_keys(kind, path) if depth else []:
        found += [name, *(f"{name}.{deeper}" for deeper in _names_below(kind, (*path, name), depth - 1))]
    return found


def _known_keys(kind: type[ConfigModel], path: tuple[int | str, ...]) -> list[str]:
    """Field names of the section that `path` leads to; all names met on the way where it forks."""
    return [name for section in _sections(kind, path) for name in section.model_fields]


def _kinds(kind: type[ConfigModel], path: tuple[int | str, ...]) -> list[str]:
    """Kinds that the section may have that `path` leads to."""
    return [
        str(name) for section in _sections(kind, path) for name in get_args(section.model_fields["kind"].annotation)
    ]


def _sections(kind: type[ConfigModel], path: tuple[int | str, ...]) -> list[type[ConfigModel]]:
    """Classes of the section that `path` leads to; all that are met on the way where it forks."""
    sections: list[type[ConfigModel]] = [kind]
    for part in path:
        fields = [s.model_fields[part].annotation for s in sections if part in s.model_fields]
        if fields:
            sections = [model for annotation in fields for model in _models_in(annotation)]
    return sections


def _models_in(annotation: object) -> list[type[ConfigModel]]:
    """Configuration classes named anywhere in a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        return [annotation]
    return [model for inner in getattr(annotation, "__args__", ()) for model in _models_in(inner)]
