"""The program of the process that runs a solution: calls in, answers out, as lines of JSON.

`tester.py` starts it from its text, in a sandbox where only the standard library is. It knows the solution and what it
is called with, and neither what is expected nor how a verdict looks.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import types


def answer(module: types.ModuleType, function: str, arguments: str) -> dict[str, str]:
    """What a call gives: its value as a literal, or its error."""
    try:
        return {"value": repr(vars(module)[function](*ast.literal_eval(arguments)))}
    except BaseException as error:  # noqa: BLE001 - whatever the solution raises is the answer
        return {"error": said(error)}


def said(error: BaseException) -> str:
    """An error on a line."""
    return f"{type(error).__name__}: {error}"[:200]


def main() -> None:
    """Load the solution, then answer calls until there are none."""
    calls = os.fdopen(int(sys.argv[1]), encoding="utf-8")
    answers = os.fdopen(int(sys.argv[2]), "w", encoding="utf-8")
    sys.modules["solution"] = module = types.ModuleType("solution")
    failure = None
    try:
        exec(compile(json.loads(calls.readline()), "solution.py", "exec"), vars(module))
    except BaseException as error:  # noqa: BLE001 - whatever the solution raises is the answer
        failure = {"error": said(error)}
    for line in calls:
        answers.write(json.dumps(failure or answer(module, *json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
