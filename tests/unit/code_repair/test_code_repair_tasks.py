from __future__ import annotations

import ast
import difflib

import pytest

from agentrl.envs.definition import load_environment
from agentrl.types.errors import ConfigError
from agentrl.types.task import Split, Task
from agentrl_environments.code_repair.human_eval import examples, human_eval_rows
from agentrl_environments.code_repair.mutations import mutants
from agentrl_environments.code_repair.suites import Cases, Check
from agentrl_environments.code_repair.tasks import CodeRepairOptions, Problem, problem_of, sample_task
from agentrl_environments.code_repair.templates import FUNCTIONS_OF_LINES, LINES

GENERATED = ("one_line", "functions")


def problems(source: str, split: Split, count: int, seed: int = 0) -> list[Problem]:
    options = CodeRepairOptions(source=source)
    return [problem_of(options, sample_task(options, split, ordinal, seed)) for ordinal in range(count)]


def failures(source: str, cases: Cases) -> int:
    """How many cases a function of ours gets wrong, told by Python itself."""
    names: dict = {}
    exec(source, names)
    wrong = 0
    for arguments, expected in cases.cases:
        try:
            wrong += names[cases.entry](*ast.literal_eval(arguments)) != ast.literal_eval(expected)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            wrong += 1
    return wrong


@pytest.mark.parametrize("source", GENERATED)
@pytest.mark.parametrize("split", list(Split))
def test_the_solution_passes_all_tests_and_the_module_fails_some_visible_and_some_hidden(source, split):
    for problem in problems(source, split, 150):
        assert failures(problem.solution, problem.visible) == failures(problem.solution, problem.hidden) == 0
        assert failures(problem.module, problem.visible) > 0
        assert failures(problem.module, problem.hidden) > 0


@pytest.mark.parametrize("source", GENERATED)
def test_a_module_differs_from_its_solution_in_one_line(source):
    for problem in problems(source, Split.TRAIN, 100):
        lines = difflib.ndiff(problem.module.splitlines(), problem.solution.splitlines())
        assert sorted(line[0] for line in lines if line[0] in "+-") == ["+", "-"]


def test_one_line_problems_are_one_line():
    assert all(problem.module.count("\n") == 1 for problem in problems("one_line", Split.TRAIN, 100))


@pytest.mark.parametrize(("source", "templates"), [("one_line", LINES), ("functions", FUNCTIONS_OF_LINES)])
def test_every_template_is_used(source, templates):
    starts = {template.description.split("$")[0] for template in templates}
    described = [problem.description for problem in problems(source, Split.TRAIN, 600)]
    assert [start for start in starts if not any(start in text for text in described)] == []


@pytest.mark.parametrize("source", GENERATED)
def test_no_module_belongs_to_both_splits(source):
    trained = {problem.module for problem in problems(source, Split.TRAIN, 400)}
    held = {problem.module for problem in problems(source, Split.HELDOUT, 200)}
    assert trained & held == set()


@pytest.mark.parametrize("source", GENERATED)
def test_equal_arguments_give_equal_problems_and_held_out_ones_ignore_the_seed(source):
    assert problems(source, Split.TRAIN, 20) == problems(source, Split.TRAIN, 20)
    assert problems(source, Split.TRAIN, 20) != problems(source, Split.TRAIN, 20, seed=1)
    assert problems(source, Split.HELDOUT, 20) == problems(source, Split.HELDOUT, 20, seed=1)


def test_mutants_change_one_operator_constant_or_name():
    assert mutants("f = lambda a: a + 1") == ["f = lambda a: a - 1", "f = lambda a: a + 2", "f = lambda a: a + 0"]
    assert mutants("x = max(a, b)") == ["x = min(a, b)"]
    assert mutants("x = a < b") == ["x = a <= b", "x = a > b"]
    assert mutants("x = True") == []


def test_human_eval_has_each_of_its_problems_once():
    options = CodeRepairOptions(source="human_eval")
    definition = load_environment("code_repair")
    trained = definition.describe(options).num_tasks
    assert trained is not None
    tasks = definition.sample(options, Split.TRAIN, 0, range(trained))
    tasks += definition.sample(options, Split.HELDOUT, 0, range(164 - trained))
    assert 110 < trained < 135
    assert {task.payload["task_id"] for task in tasks} == {f"HumanEval/{n}" for n in range(164)}


def test_a_human_eval_problem_is_a_function_without_its_body():
    options = CodeRepairOptions(source="human_eval")
    rows = [
        human_eval_rows().row(split, ordinal, 0) for split in Split for ordinal in range(human_eval_rows().num_tasks)
    ]
    row = next(row for row in rows if row["task_id"] == "HumanEval/2")
    problem = problem_of(options, Task("code_repair", Split.TRAIN, 0, row))
    assert problem.description == "write the function truncate_number in solution.py."
    assert ast.unparse(ast.parse(problem.module).body[-1].body[-1]) == "raise NotImplementedError"
    assert row["canonical_solution"] not in problem.module
    assert problem.visible == Cases("truncate_number", (("(3.5,)", "0.5"),))
    assert isinstance(problem.hidden, Check)
    names: dict = {}
    exec(problem.solution, names)
    exec(problem.hidden.source, checks := {})
    checks["check"](names["truncate_number"])


def test_examples_are_single_calls_with_a_literal():
    prompt = '''def f(a, b):
    """Add.
    >>> f(1, 2)
    3
    >>> f([1], x)
    [1]
    >>> f(2, 2) == 4
    True
    >>> f("a", "b")
    'ab'
    """
'''
    assert examples(prompt, "f") == Cases("f", (("(1, 2)", "3"), ("('a', 'b')", "'ab'")))
    assert examples("def f():\n    pass\n", "f") is None


def test_unknown_sources_are_refused():
    with pytest.raises(ConfigError, match="'one_line', 'functions' or 'human_eval'"):
        load_environment("code_repair").parse_options({"source": "nowhere"})
