"""Plants a bug: one operator, one constant or one name of a function is changed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

_OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


def mutants(source: str) -> list[str]:
    """All versions of a source with one change, in the order of the places: operators, whole numbers, names."""
    count = sum(1 for _ in _changes(ast.parse(source)))
    found = []
    for number in range(count):
        tree = ast.parse(source)
        list(_changes(tree))[number]()
        found.append(ast.unparse(tree))
    return found


def _changes(tree: ast.AST) -> Iterator[Callable[[], None]]:
    """Functions that each make one change in the tree."""
    for node in ast.walk(tree):
        match node:
            case ast.BinOp():
                yield from (_setter(node, "op", other()) for other in _OPERATORS.get(type(node.op), ()))
            case ast.Compare(ops=[operator]):
                yield from (_setter(node, "ops", [other()]) for other in _OPERATORS.get(type(operator), ()))
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                yield from (_setter(node, "value", value + step) for step in (1, -1))
            case ast.Name(id=name) if name in _NAMES:
                yield _setter(node, "id", _NAMES[name])


def _setter(node: ast.AST, field: str, value: object) -> Callable[[], None]:
    return lambda: setattr(node, field, value)
