"""The APIs of one episode: instances of the package's classes, whose methods are called by name."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.types.message import ToolSpec
from agentrl_environments.bfcl.tasks import GoldCall, Scenario, api_class, functions_of, has_state

_MOST_BITS = 100_000


class Apis:
    """Instances of their own for each episode; nothing of them is shared with another one's.

    Only functions that the package describes can be called: `functions`, by name.

    Example: ``Apis(scenario, any_version=False).call("cd", ("document",), {})`` gives
    ``'{"current_working_directory": "document"}'``.
    """

    def __init__(self, scenario: Scenario, *, any_version: bool) -> None:
        self.instances = {name: _instance(scenario, name, any_version) for name in scenario.classes}
        self.functions: dict[str, ToolSpec] = {}
        self._owners: dict[str, Any] = {}
        for name, instance in self.instances.items():
            functions = functions_of(name, any_version)
            self.functions |= functions
            self._owners |= dict.fromkeys(functions, instance)

    def call(self, name: str, positional: Sequence[Any], named: Mapping[str, Any]) -> str:
        """What a function returns or raises, as the policy reads it. Raises KeyError for an unknown name."""
        function = getattr(self._owners[name], name)
        if name == "power" and _is_endless(**named):
            return "Error during execution: the result has too many digits"
        try:
            return _text(function(*positional, **named))
        except Exception as error:  # noqa: BLE001 - arguments are the policy's, and raise whatever they like in there
            return f"Error during execution: {error}"


def _is_endless(base: object = 0, exponent: object = 0, **_others: object) -> bool:
    """Whether a power of integers, which Python computes to its last digit, would hold up the worker."""
    if not isinstance(base, int) or not isinstance(exponent, int):
        return False
    return exponent * base.bit_length() > _MOST_BITS


def named_arguments(scenario: Scenario, call: GoldCall, *, any_version: bool) -> dict[str, Any]:
    """The arguments of a reference call, all by name. Raises KeyError if no API of the task has the function."""
    owners = {name: each for each in scenario.classes for name in functions_of(each, any_version)}
    function = getattr(api_class(owners[call.name], any_version), call.name)
    return dict(list(inspect.signature(function).bind(None, *call.positional, **call.named).arguments.items())[1:])


def _instance(scenario: Scenario, class_name: str, any_version: bool) -> Any:
    instance = api_class(class_name, any_version)()
    if not has_state(class_name, any_version):
        return instance
    state = copy.deepcopy(scenario.first_states.get(class_name, {}))
    instance._load_scenario(state, long_context=scenario.has_long_results)
    # Long contexts put the package's own dictionaries into it, which calls then change for every other episode.
    return copy.deepcopy(instance)


def _text(result: Any) -> str:
    """As the package writes results."""
    if isinstance(result, str):
        return result
    if not isinstance(result, dict):
        return str(result)
    try:
        return json.dumps(result)
    except (TypeError, ValueError, RecursionError):
        return str(result)
