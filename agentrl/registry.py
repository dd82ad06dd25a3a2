"""Finds plugins through entry points; listing them imports none of them."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from agentrl.types.errors import ConfigError

ENVIRONMENTS = "agentrl.environments"
SCAFFOLDS = "agentrl.scaffolds"
SANDBOXES = "agentrl.sandboxes"
SCORERS = "agentrl.scorers"
_DISTRIBUTION = "agentrl"
_SHIPPED_PACKAGES = ("agentrl_environments", "agentrl_scaffolds")


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
    # A distribution reads its metadata anew whenever it is asked for its name.
    names: dict[int, str] = {}
    found = set()
    for entry in entry_points(group=group):
        key = id(entry.dist)
        if key not in names:
            names[key] = entry.dist.name if entry.dist else "?"
        found.add(Plugin(entry.name, entry.value, names[key]))
    return sorted(found, key=lambda plugin: (plugin.name, plugin.target))


def load_plugin(group: str, name: str) -> object:
    """The object registered as `name`, or named directly as ``module:attribute``.

    Raises:
        ConfigError: the name is unknown or ambiguous, or its module cannot be imported.
    """
    return load_target(name if ":" in name else find_plugin(group, name).target)


def is_shipped(group: str, name: str) -> bool:
    """Whether a plugin, registered or named as ``module:attribute``, comes with agentrl. Imports nothing of it.

    Raises:
        ConfigError: the name is unknown or ambiguous.
    """
    if ":" in name:
        return name.partition(":")[0].partition(".")[0] in _SHIPPED_PACKAGES
    return find_plugin(group, name).distribution == _DISTRIBUTION


def shipped_file(group: str, name: str, file: str) -> Path:
    """A file, such as a recipe, that lies beside a plugin's code; the plugin is not imported.

    Raises:
        ConfigError: the name is unknown or ambiguous, or no such file lies there.
    """
    module = (name if ":" in name else find_plugin(group, name).target).partition(":")[0]
    spec = importlib.util.find_spec(module)
    places = (spec and spec.submodule_search_locations) or []
    found = next((path for path in (Path(place) / file for place in places) if path.exists()), None)
    if found is None:
        raise ConfigError(f"'{name}' in {group} ships no {file}; it would lie beside {module}")
    return found


def find_plugin(group: str, name: str) -> Plugin:
    """The plugin registered as `name`. Raises ConfigError if it is unknown or ambiguous."""
    plugins = [plugin for plugin in list_plugins(group) if plugin.name == name]
    if len(plugins) > 1:
        owners = ", ".join(f"{p.target} ({p.distribution})" for p in plugins)
        raise ConfigError(f"{group} '{name}' is registered more than once: {owners}; use module:attribute")
    if not plugins:
        names = [plugin.name for plugin in list_plugins(group)]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"registered: {', '.join(names) or 'none'}"
        raise ConfigError(f"no plugin '{name}' in {group}; {hint}")
    return plugins[0]


def load_target(target: str) -> object:
    """What ``module:attribute`` names. Raises ConfigError."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"plugin {target} cannot be loaded: a name is of the form module:attribute")
    try:
        found = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"plugin {target} cannot be loaded: {error}; install its package, or correct it") from error
    except SystemExit as error:
        raise ConfigError(f"plugin {target} cannot be loaded: its import calls sys.exit({error.code})") from error
    return found
