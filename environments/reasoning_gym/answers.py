"""Which answers may be judged: some judges of reasoning-gym evaluate them as Python, and text of a model must not be.

Seen in 0.1.25: four judges call `eval`, five call `sympy.parse_expr`, which evaluates as well. What they get is first
read as a syntax tree, and must be of the few forms that their answers have.
"""

from __future__ import annotations

import ast
import math

LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
ARITHMETIC = frozenset({"countdown", "puzzle24"})
FORMULAS = frozenset({"intermediate_integration", "polynomial_multiplication", "simple_integration"})
_MAX_CHARACTERS = 2000
_MAX_POWER = 100
_MAX_POWERS_IN_POWERS = 2
_FUNCTIONS = frozenset("Abs acos asin atan cos cosh exp ln log sin sinh sqrt tan tanh".split())
_CONSTANTS = frozenset({"pi", "E"})
_LIST_NODES = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Load, ast.UnaryOp, ast.USub)
_ARITHMETIC_NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Load),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UAdd, ast.USub),
)


def may_judge(generator: str, answer: str) -> bool:
    """Whether the judge of a generator may be given an answer.

    Example: of ``countdown`` it may be given ``(7 - 3)*4`` and not ``open('a')`` or ``9**9**9``.
    """
    if generator not in LISTS | ARITHMETIC | FORMULAS:
        return True
    # Before it is read: what is too deep for `ast.parse` at one depth of the stack may be evaluated at another.
    if len(answer) > _MAX_CHARACTERS:
        return False
    try:
        tree = _tree(answer)
    except (RecursionError, MemoryError):
        return False
    if generator in LISTS:
        # A name alone is looked up, which does nothing; what is no expression cannot be evaluated.
        is_word = tree is not None and isinstance(tree.body, ast.Name)
        return tree is None or is_word or all(isinstance(node, _LIST_NODES) for node in ast.walk(tree))
    # sympy's syntax is wider than Python's, so that what is no expression of Python may be one of its.
    if tree is None:
        return False
    is_known = _is_arithmetic if generator in ARITHMETIC else _is_of_formula
    return all(is_known(node) for node in ast.walk(tree)) and _powers(tree) <= _MAX_POWERS_IN_POWERS


def _tree(text: str) -> ast.Expression | None:
    """The text as an expression of Python; None if it is none.

    Raises:
        RecursionError, MemoryError: it is too deep to be read.
    """
    try:
        return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return None


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    return isinstance(node, _ARITHMETIC_NODES)


def _is_of_formula(node: ast.AST) -> bool:
    """Arithmetic, symbols of one letter, known functions, and powers that can be computed."""
    match node:
        case ast.Name():
            return len(node.id) == 1 or node.id in _FUNCTIONS | _CONSTANTS
        case ast.Call():
            return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
        case ast.BinOp(op=ast.Pow()):
            return _is_small(node.right)
    return isinstance(node, ast.Pow) or _is_arithmetic(node)


def _is_small(power: ast.expr) -> bool:
    """Whether an exponent has no power in it, and the product of its numbers is not above the limit."""
    nodes = list(ast.walk(power))
    found = [node.value for node in nodes if isinstance(node, ast.Constant)]
    sizes = [max(1.0, float(number)) for number in found if isinstance(number, int | float) and number < _MAX_POWER + 1]
    has_power = any(isinstance(node, ast.Pow) for node in nodes)
    return not has_power and len(sizes) == len(found) and math.prod(sizes) <= _MAX_POWER


def _powers(node: ast.AST) -> int:
    """How deep powers stand in powers."""
    deepest = max((_powers(child) for child in ast.iter_child_nodes(node)), default=0)
    return deepest + (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow))
