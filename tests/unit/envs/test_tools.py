from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from agentrl.envs.tools import Toolbox, ToolError, external_tool, tool
from agentrl.types.errors import ConfigError
from agentrl.types.message import ToolCall


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    title: str
    x: float = 0.0


class Size(BaseModel):
    width: Annotated[int, Field(gt=0)]


class Desk:
    """Whatever hints may say."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    @tool
    def find(self, text: str, limit: int = 3) -> list[str]:
        """Find documents.

        The newest come first.

        Args:
            text: words to look for,
                all of them
            limit: how many at most
        """
        return [text] * limit

    @external_tool
    async def send(self, to: str, copy: Literal["yes", "no"] = "no") -> None:
        """Send it."""
        self.sent.append(f"{to} {copy}")

    @tool
    def draw(self, colour: Colour, at: Point, size: Size | None = None) -> dict[str, Any]:
        return {"colour": colour.value, "x": at.x, "width": size.width if size else None}

    @tool
    def lose(self) -> str:
        raise ToolError("nothing was lost")

    @tool
    def burn(self) -> str:
        raise RuntimeError("on fire")

    def private(self) -> None:
        """No tool."""


BOX = Toolbox(Desk)


async def call(name: str, /, **arguments: Any) -> str:
    return await BOX.call(Desk(), ToolCall("c", name, arguments))


def test_tools_are_told_in_their_order_with_what_their_docstrings_say():
    assert [spec.name for spec in BOX.specs] == ["find", "send", "draw", "lose", "burn"]
    find, send, *_ = BOX.specs
    assert find.description == "Find documents.\nThe newest come first."
    assert find.parameters == {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "words to look for,\nall of them"},
            "limit": {"type": "integer", "description": "how many at most", "default": 3},
        },
        "required": ["text"],
    }
    assert send.parameters["properties"]["copy"] == {"type": "string", "enum": ["yes", "no"], "default": "no"}
    assert BOX.external == {"send"}


def test_schemas_of_nested_types_have_no_titles_but_fields_of_that_name():
    parameters = BOX.specs[2].parameters
    assert parameters["properties"] == {
        "colour": {"$ref": "#/$defs/Colour"},
        "at": {"$ref": "#/$defs/Point"},
        "size": {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}], "default": None},
    }
    assert parameters["$defs"] == {
        "Colour": {"type": "string", "enum": ["red", "blue"]},
        "Point": {
            "type": "object",
            "properties": {"title": {"type": "string"}, "x": {"type": "number", "default": 0.0}},
            "required": ["title"],
        },
        "Size": {
            "type": "object",
            "properties": {"width": {"type": "integer", "exclusiveMinimum": 0}},
            "required": ["width"],
        },
    }


async def test_results_are_text_as_it_is_nothing_as_done_and_anything_else_as_json():
    assert await call("find", text="a", limit=2) == '["a","a"]'
    assert await call("send", to="ada", copy="yes") == "done"
    drawn = await call("draw", colour="red", at={"title": "here", "x": 2}, size={"width": 3})
    assert drawn == '{"colour":"red","x":2.0,"width":3}'


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("find", {}, "find: argument text is missing; its arguments are text, limit (optional)"),
        ("find", {"text": "a", "limit": "many"}, "find: limit: Input should be a valid integer"),
        ("find", {"text": "a", "number": 1}, "find: unknown argument number; its arguments are"),
        ("find", {"argument_0": "a"}, "find: argument text is missing; unknown argument argument_0"),
        ("find", {"text": 8 * "long " * 40 and list(range(99))}, "text: Input should be a valid string (got [0, 1, 2"),
        ("lose", {"x": 1}, "lose: unknown argument x; it takes no arguments"),
        ("lose", {}, "nothing was lost"),
        ("draw", {"colour": "green", "at": {"title": "a"}}, "draw: colour: Input should be 'red' or 'blue'"),
        ("draw", {"colour": "red", "at": {"title": "a"}, "size": {"width": 0}}, "size.width: Input should be greater"),
        ("paint", {}, "no tool 'paint'; there are find, send, draw, lose, burn"),
        ("private", {}, "no tool 'private'"),
    ],
)
async def test_what_is_wrong_with_a_call_is_an_observation(name: str, arguments: dict[str, Any], said: str):
    observation = await call(name, **arguments)
    assert observation.startswith("error: ")
    assert said in observation
    assert len(observation) < 300


async def test_a_malformed_call_is_an_observation_and_a_fault_of_the_tool_is_none():
    malformed = ToolCall("c", "find", {}, error="invalid_json", raw='{"text": ')
    assert await BOX.call(Desk(), malformed) == "error: the tool call is malformed (invalid_json)"
    with pytest.raises(RuntimeError, match="on fire"):
        await call("burn")


def test_a_tool_can_be_called_by_the_class_itself_and_one_of_a_base_is_overridden():
    assert Desk().find("a", 1) == ["a"]

    class Newer(Desk):
        @tool
        def find(self, text: str) -> str:
            """Find one."""
            return text

    names = [spec.name for spec in Toolbox(Newer).specs]
    assert names == ["find", "send", "draw", "lose", "burn"]
    assert Toolbox(Newer).specs[0].description == "Find one."


def no_hint(self, text): ...
def any_number(self, *texts: str): ...
def by_place(self, text: str, /): ...
def unknown(self, text: Nowhere): ...  # noqa: F821
def unlike_json(self, then: Callable[[], int]): ...
def of_no_schema(self, thing: object.__class__ | Desk): ...


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (no_hint, "parameter 'text' has no type hint; write text: str"),
        (any_number, r"'\*texts.*' cannot be passed by name; give it parameters with names"),
        (by_place, "'text.*' cannot be passed by name"),
        (unknown, "its type hints cannot be read: name 'Nowhere' is not defined; import what they name"),
        (unlike_json, "its type hints cannot become a schema: .*; use types that JSON has"),
        (of_no_schema, "its type hints cannot become a schema: .*; use types that JSON has"),
    ],
)
def test_a_signature_that_cannot_become_a_schema_is_refused_by_name(function: Callable[..., Any], said: str):
    kind = type("Wrong", (), {"act": tool(function)})
    with pytest.raises(ConfigError, match=rf"^tool 'act' of .*Wrong: {said}"):
        Toolbox(kind)
