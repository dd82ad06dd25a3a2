"""Typed methods as tools: the one way from a signature to the schema that a policy reads.

The type hints become the schema of the arguments, the docstring their description. What a policy passes is checked
against the same hints, so schema and check cannot differ.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import to_json

from agentrl.types.errors import ConfigError
from agentrl.types.message import ToolCall, ToolSpec

Method = TypeVar("Method", bound=Callable[..., Any])
_MAX_SHOWN = 60  # characters of a wrong argument


class ToolError(Exception):
    """What a tool raises for the policy to read: it becomes the observation, and the episode goes on."""


class ToolMethod:
    """A method that is marked as a tool; on an instance it is the method itself."""

    def __init__(self, function: Callable[..., Any], is_external: bool) -> None:
        self.function, self.is_external = function, is_external
        self.__doc__ = function.__doc__

    def __get__(self, instance: object, owner: type) -> Any:
        return self if instance is None else types.MethodType(self.function, instance)


def tool(method: Method) -> Method:
    """Mark a method as a tool.

    Example::

        @tool
        def add(self, a: int, b: int) -> int:
            "Add two numbers."
            return a + b
    """
    return cast("Method", ToolMethod(method, is_external=False))


def external_tool(method: Method) -> Method:
    """Mark a method as a tool that acts outside the instance: it sends, pays or publishes.

    A call is never repeated when an episode is recovered.
    """
    return cast("Method", ToolMethod(method, is_external=True))


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool of a class: what the policy is told, and how a call of it is carried out."""

    spec: ToolSpec
    is_external: bool
    _function: Callable[..., Any]
    _arguments: type[BaseModel]
    _names: dict[str, str]

    async def call(self, owner: object, call: ToolCall) -> str:
        """The observation of a call. Wrong arguments and a ToolError are observations too; other errors pass."""
        try:
            checked = self._arguments.model_validate(call.arguments)
        except ValidationError as error:
            return f"error: {self.spec.name}: {'; '.join(map(_fault, error.errors()))}; {self._usage()}"
        values = {name: getattr(checked, field) for field, name in self._names.items()}
        try:
            result = self._function(owner, **values)
            return _text(await result if inspect.isawaitable(result) else result)
        except ToolError as error:
            return f"error: {error}"

    def _usage(self) -> str:
        properties = self.spec.parameters["properties"]
        required = self.spec.parameters.get("required", [])
        shown = [f"{name}{'' if name in required else ' (optional)'}" for name in properties]
        return f"its arguments are {', '.join(shown)}" if shown else "it takes no arguments"


class Toolbox:
    """The tools of a class, by name, in the order in which they are written.

    Raises:
        ConfigError: a tool's hints are missing or cannot become a schema.
    """

    def __init__(self, owner: type) -> None:
        found = {name: member for kind in reversed(owner.__mro__) for name, member in vars(kind).items()}
        marked = {name: member for name, member in found.items() if isinstance(member, ToolMethod)}
        self._tools = {name: _build(owner, name, method) for name, method in marked.items()}

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """What the policy is told of them."""
        return tuple(known.spec for known in self._tools.values())

    @property
    def external(self) -> frozenset[str]:
        """Names of those that act outside the instance."""
        return frozenset(name for name, known in self._tools.items() if known.is_external)

    async def call(self, owner: object, call: ToolCall) -> str:
        """The observation of a call, a malformed one or one of an unknown tool included."""
        if call.error is not None:
            return f"error: the tool call is malformed ({call.error})"
        if call.name not in self._tools:
            return f"error: no tool '{call.name}'; {_listed(self._tools)}"
        return await self._tools[call.name].call(owner, call)


def _build(owner: type, name: str, method: ToolMethod) -> Tool:
    where = f"tool '{name}' of {owner.__module__}.{owner.__qualname__}"
    hints = _hints(method.function, where)
    doc = docstring_parser.parse(inspect.cleandoc(method.function.__doc__ or ""))
    described = {parameter.arg_name: parameter.description for parameter in doc.params}
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    for parameter in list(inspect.signature(method.function).parameters.values())[1:]:
        _check_parameter(parameter, hints, where)
        default = ... if parameter.default is parameter.empty else parameter.default
        # Under a name of our own no parameter collides with what the model class has itself, such as "copy".
        field = f"argument_{len(fields)}"
        names[field] = parameter.name
        about = Field(default, alias=parameter.name, description=described.get(parameter.name))
        fields[field] = (hints[parameter.name], about)
    try:
        arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = arguments.model_json_schema()
    except PydanticUserError as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{where}: its type hints cannot become a schema: {first}; use types that JSON has") from None
    description = "\n".join(part for part in (doc.short_description, doc.long_description) if part)
    return Tool(ToolSpec(name, description, _parameters(schema)), method.is_external, method.function, arguments, names)


def _hints(function: Callable[..., Any], where: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{where}: its type hints cannot be read: {error}; import what they name") from None


def _check_parameter(parameter: inspect.Parameter, hints: dict[str, Any], where: str) -> None:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ConfigError(f"{where}: '{parameter}' cannot be passed by name; give it parameters with names")
    if parameter.name not in hints:
        raise ConfigError(f"{where}: parameter '{parameter.name}' has no type hint; write {parameter.name}: str, say")


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of arguments with its keys in the order in which people write them."""
    plain = _plain(schema)
    first = {"type": "object", "properties": plain.get("properties", {})}
    return first | {key: value for key, value in plain.items() if key not in first}


def _plain(schema: Any) -> Any:
    """A schema without titles, which repeat names and cost tokens, and unsaid that nothing but the fields is taken."""
    if isinstance(schema, list):
        return [_plain(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            made[key] = {name: _plain(part) for name, part in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            made[key] = value
        elif key != "title" and (key, value) != ("additionalProperties", False):
            made[key] = _plain(value)
    return made


def _fault(entry: Any) -> str:
    path = ".".join(str(part) for part in entry["loc"])
    if entry["type"] == "extra_forbidden":
        return f"unknown argument {path}"
    if entry["type"] == "missing":
        return f"argument {path} is missing"
    shown = repr(entry["input"])
    shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
    return f"{path}: {entry['msg']} (got {shown})"


def _text(result: object) -> str:
    """What the policy reads of a result: text as it is, anything else as JSON."""
    if result is None:
        return "done"
    return result if isinstance(result, str) else to_json(result).decode()


def _listed(names: Iterable[str]) -> str:
    known = list(names)
    return f"there are {', '.join(known)}" if known else "there are none"
