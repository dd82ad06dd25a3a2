"""Draws arguments that a tool's schema allows."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

_WORDS = ("a", "one", "name", "0", "yes", "data", "hello world", "")
_MAX_ITEMS = 2
_MAX_DEPTH = 4


def draw_arguments(parameters: Mapping[str, Any], chance: random.Random) -> dict[str, Any]:
    """Arguments for a tool; optional ones are left out half of the time.

    What a schema's patterns and formats ask of a text is not read.

    Example: of ``{"properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}`` it makes
    ``{"n": 4}``.
    """
    drawn = _Draw(parameters.get("$defs", {}), chance).value(parameters, 0)
    return drawn if isinstance(drawn, dict) else {}


class _Draw:
    def __init__(self, definitions: Mapping[str, Any], chance: random.Random) -> None:
        self._definitions, self._chance = definitions, chance

    def value(self, schema: Mapping[str, Any], depth: int) -> Any:
        if "$ref" in schema:
            return self.value(self._definitions[schema["$ref"].rpartition("/")[2]], depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._chance.choice(schema["enum"])
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            # A schema that holds itself ends with its smallest choice, which is null where there is one.
            return self.value(choices[-1] if depth > _MAX_DEPTH else self._chance.choice(choices), depth + 1)
        kind = schema.get("type", "object" if "properties" in schema else "string")
        return self._of_type(self._chance.choice(kind) if isinstance(kind, list) else kind, schema, depth)

    def _of_type(self, kind: str, schema: Mapping[str, Any], depth: int) -> Any:
        if kind == "object":
            required = schema.get("required", [])
            wanted = {n: s for n, s in schema.get("properties", {}).items() if n in required or self._is_taken(depth)}
            return {name: self.value(part, depth + 1) for name, part in wanted.items()}
        if kind == "array":
            least = schema.get("minItems", 0)
            count = max(least, min(self._chance.randint(0, _MAX_ITEMS), schema.get("maxItems", _MAX_ITEMS)))
            return [self.value(schema.get("items", {}), depth + 1) for _ in range(count)]
        if kind in ("integer", "number"):
            return self._number(kind, schema)
        if kind == "boolean":
            return self._chance.random() < 0.5
        return None if kind == "null" else self._text(schema)

    def _is_taken(self, depth: int) -> bool:
        return depth <= _MAX_DEPTH and self._chance.random() < 0.5

    def _number(self, kind: str, schema: Mapping[str, Any]) -> float | int:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
        high = schema.get("maximum", schema.get("exclusiveMaximum", max(low, 0) + 101) - 1)
        if kind == "integer":
            return self._chance.randint(int(low), max(int(low), int(high)))
        return self._chance.uniform(low, max(low, high))

    def _text(self, schema: Mapping[str, Any]) -> str:
        least: int = schema.get("minLength", 0)
        text = self._chance.choice(_WORDS).ljust(least, "x")
        most: int = schema.get("maxLength", len(text))
        return text[:most]
