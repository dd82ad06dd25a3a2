"""Whatever is wrong with the input, the answer is one line that names it and says what to do, and nothing is left."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.cli import bad_commands, bad_models, bad_plans, bad_recipes, bad_runs, bad_scorers
from tests.unit.cli.bad_case import HEAVY, Case, answer_to

CASES = (
    *bad_commands.CASES, *bad_recipes.CASES, *bad_models.CASES, *bad_runs.CASES, *bad_scorers.CASES, *bad_plans.CASES,
)  # fmt: skip
ROOT = Path(__file__).parents[3]
# One process for all of them: what a case loads shows in those behind it as well, and the first is named.
LIGHT = """
import json, sys, tempfile
from pathlib import Path
from tests.unit.cli.bad_case import HEAVY, answer_to
from tests.unit.cli.test_bad_input import CASES
model, loaded = Path(sys.argv[1]), {}
for case in (case for case in CASES if case.is_light):
    with tempfile.TemporaryDirectory() as folder:
        answer_to(case, model, Path(folder))
    loaded[case.id] = [name for name in HEAVY if name in sys.modules]
print(json.dumps(loaded))
"""


def test_the_table_is_large_and_every_case_has_a_name_of_its_own():
    assert len(CASES) >= 200
    assert [name for name, count in Counter(case.id for case in CASES).items() if count > 1] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bad_input_is_one_line_that_names_it_and_leaves_nothing(case: Case, tiny_model: Path, tmp_path: Path):
    answer = answer_to(case, tiny_model, tmp_path)
    assert answer.output.startswith("error: "), answer.output
    assert answer.output.count("\n") == 1, answer.output
    assert [part for part in case.says if part not in answer.output] == [], answer.output
    assert answer.exit_code in (1, 2)
    assert answer.left == ()


def test_a_port_in_use_is_one_line_that_names_it(tiny_model: Path, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        call = Case("port", ("engine", "model", "--port", str(port)), (f"port {port}", "give another --port"))
        test_bad_input_is_one_line_that_names_it_and_leaves_nothing(call, tiny_model, tmp_path)


def test_what_files_alone_tell_loads_nothing_heavy(tiny_model: Path):
    child = subprocess.run(
        [sys.executable, "-c", LIGHT, str(tiny_model)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert child.returncode == 0, child.stderr
    loaded = json.loads(child.stdout.splitlines()[-1])
    assert len(loaded) >= 200
    assert {name: modules for name, modules in loaded.items() if modules} == {}, HEAVY
