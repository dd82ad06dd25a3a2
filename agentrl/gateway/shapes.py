"""Checking what programs send against the types of the official SDKs, and taking the text out of it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from agentrl.types.message import Message, Role, ToolSpec
from agentrl.types.program import CallRefusedError

Shape = TypeAdapter[Any]
T = TypeVar("T")


def refused(message: str, place: str = "") -> CallRefusedError:
    """A refusal of what stands at a place of the request."""
    return CallRefusedError(f"{place}: {message}" if place else message, parameter=place)


def refused_content(kind: object, place: str) -> CallRefusedError:
    """A refusal of a part of a message that is no text."""
    return refused(f"content of type {kind!r} is no text, and the policy reads text alone", place)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises CallRefusedError if it is none."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise refused(f"the request's body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise refused("the request's body is not a JSON object")
    return value


def check(shape: Shape, value: object, place: str = "") -> None:
    """Compare all of a value with a type of an SDK; fields that the type does not have are no error.

    Raises:
        CallRefusedError: names the first place that is wrong.
    """
    try:
        checked = shape.validate_python(value, strict=True)
    except ValidationError as error:
        raise _refusal_of(error, value, place) from error
    _exhaust(checked, value, place)


def check_settings(shape: Shape, body: Mapping[str, Any], read: Collection[str], **others: object) -> None:
    """Check the settings of a request that are read; `others` stand for the parts that are checked one by one.

    What is not read is not checked: its values may be newer than the SDK. Raises CallRefusedError as `check` does.
    """
    check(shape, {name: body[name] for name in read if body.get(name) is not None} | others)


def given(value: Any) -> Any:
    """An object without its nulls: programs write them where SDKs leave a field out."""
    return {name: part for name, part in value.items() if part is not None} if isinstance(value, dict) else value


def objects(value: Any, place: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects of a list, each with its place; a null is an empty list. Raises CallRefusedError for all else."""
    if not isinstance(value, list | None):
        raise refused("Input should be a list", place)
    for n, entry in enumerate(value or ()):
        if not isinstance(entry, dict):
            raise refused("Input should be an object", f"{place}[{n}]")
        yield entry, f"{place}[{n}]"


def one_of(choices: Mapping[str, T], value: object, place: str) -> T:
    """What a word stands for. Raises CallRefusedError for one that is none of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise refused(f"Input should be one of {', '.join(choices)}", place)
    return choices[value]


def text_of(content: Any, place: str, fields: Mapping[str, str], separator: str = "") -> str:
    """The text of a message's content: a string, or parts of the kinds in `fields`, which says where their text is.

    Raises:
        CallRefusedError: a part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part, where in objects(content, place):
        field = fields.get(str(part.get("type")))
        if field is None:
            raise refused_content(part.get("type"), where)
        if not isinstance(part.get(field), str):
            raise refused("Input should be a valid string", f"{where}.{field}")
        texts.append(part[field])
    return separator.join(texts)


def conversation(messages: Iterable[Message], place: str) -> tuple[Message, ...]:
    """Messages that a policy can reply to: leading system messages merged, a blank line between them.

    Raises:
        CallRefusedError: there is none, or the last is the assistant's, which no policy continues.
    """
    rest = list(messages)
    leading = list(itertools.takewhile(lambda message: message.role is Role.SYSTEM, rest))
    if not rest:
        raise refused("there is no message", place)
    if rest[-1].role is Role.ASSISTANT:
        raise refused("the conversation must end with a message of the user or of a tool, not the assistant's", place)
    system = [Message(Role.SYSTEM, "\n\n".join(message.content for message in leading))] if leading else []
    return (*system, *rest[len(leading) :])


def tool_spec(name: str, description: str | None, parameters: dict[str, Any] | None) -> ToolSpec:
    """A function as the policy is told of it; one without a schema takes no arguments."""
    return ToolSpec(name, description or "", parameters) if parameters else ToolSpec(name, description or "")


def token_bound(body: Mapping[str, Any], *names: str) -> int | None:
    """The smallest of the bounds on tokens under these names. Raises CallRefusedError if one is below 1."""
    bounds: list[tuple[int, str]] = [(body[name], name) for name in names if body.get(name) is not None]
    for bound, name in bounds:
        if bound < 1:
            raise refused("Input should be at least 1", name)
    return min(bounds)[0] if bounds else None


def flag(body: Mapping[str, Any], name: str) -> bool:
    """A setting that is true, false or not there. Raises CallRefusedError for all else."""
    if not isinstance(body.get(name), bool | None):
        raise refused("Input should be true or false", name)
    return bool(body.get(name))


def in_vain(body: Mapping[str, Any], settings: Mapping[str, tuple[object, ...]], others: Collection[str]) -> list[str]:
    """Names of settings that are given and have no effect; `settings` has the values under which that is right.

    `others` are the fields that are read, or that are about no reply; one that is neither is ``unrecognized``.
    """
    names = [name for name, same in settings.items() if body.get(name) is not None and body[name] not in same]
    is_known = all(name in settings or name in others for name in body)
    return names if is_known else [*names, "unrecognized"]


def _exhaust(checked: Any, value: Any, place: str) -> None:
    """Ask for every item: pydantic checks those of an iterable no sooner."""
    match checked:
        case dict():
            for name, part in checked.items():
                _exhaust(part, value[name], f"{place}.{name}")
        case list():
            for n, part in enumerate(checked):
                _exhaust(part, value[n], f"{place}[{n}]")
        case Iterator():
            for n, part in enumerate(_refusing(checked, value, place)):
                _exhaust(part, value[n], f"{place}[{n}]")


def _refusing(items: Iterator[Any], value: Any, place: str) -> Iterator[Any]:
    try:
        yield from items
    except ValidationError as error:
        raise _refusal_of(error, value, place) from error


def _refusal_of(error: ValidationError, value: Any, place: str) -> CallRefusedError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    for part in first["loc"]:
        # Between the names of fields stand those of a union's members, which say nothing to the program.
        if isinstance(part, int) and isinstance(value, list):
            place, value = f"{place}[{part}]", value[part]
        elif isinstance(value, dict) and part in value:
            place, value = f"{place}.{part}", value[part]
    if first["type"] == "missing":
        place = f"{place}.{first['loc'][-1]}"
    return refused(first["msg"], place.removeprefix("."))
