"""Finds plugins through entry points; listing them imports none of them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from agentrl.types.errors import ConfigError

ENVIRONMENTS = "agentrl.environments"
SCAFFOLDS = "agentrl.scaffolds"


@dataclass(frozen=True, slots=True)
class Plugin:
    """A registered name, where its object lives and which distribution brought it.

    Example: ``Plugin("sql", "agentrl_environments.sql:definition", "agentrl")``.
    """

    name: str
    target: str
    distribution: str


def list_plugins(group: str) -> list[Plugin]:
    """Everything registered under `group`, by name; a name registered twice is listed twice."""
    found = [Plugin(e.name, e.value, e.dist.name if e.dist else "?") for e in entry_points(group=group)]
    return sorted(set(found), key=lambda plugin: (plugin.name, plugin.target))


def load_plugin(group: str, name: str) -> Any:
    """The object registered as `name`, or named directly as ``module:attribute``.

    Raises:
        ConfigError: the name is unknown or ambiguous, or its module cannot be imported.
    """
    if ":" in name:
        return _load_target(name)
    plugins = [plugin for plugin in list_plugins(group) if plugin.name == name]
    if len(plugins) > 1:
        owners = ", ".join(f"{p.target} ({p.distribution})" for p in plugins)
        raise ConfigError(f"{group} '{name}' is registered more than once: {owners}; use module:attribute")
    if not plugins:
        names = [plugin.name for plugin in list_plugins(group)]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"registered: {', '.join(names) or 'none'}"
        raise ConfigError(f"no plugin '{name}' in {group}; {hint}")
    return _load_target(plugins[0].target)


def _load_target(target: str) -> Any:
    import importlib

    module_name, _, attribute = target.partition(":")
    try:
        found = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"plugin {target} cannot be loaded: {error}") from error
    return found
