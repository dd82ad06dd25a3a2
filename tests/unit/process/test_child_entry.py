"""Children end with their parent from their first instruction on, whatever they import for how long."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import agentrl
from agentrl.process.parent import CHILD
from agentrl.testing.processes import is_running

LIMIT_S = 120.0
# Stands for a module whose imports take long: it has not come to its `main` yet.
SLOW = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(3600)
"""
PARENT = """
import sys, time
from agentrl.process.parent import CHILD
from agentrl.process.starting import spawn
process, connection = spawn([*CHILD, "slow_module", sys.argv[1]])
time.sleep(3600)
"""


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def slow_module(tmp_path: Path) -> Path:
    (tmp_path / "slow_module.py").write_text(SLOW)
    return tmp_path


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends children with their parent")
def test_a_child_whose_parent_is_killed_ends_while_it_imports(slow_module: Path) -> None:
    told = slow_module / "pid"
    environment = {**os.environ, "PYTHONPATH": str(slow_module)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(told)], env=environment)
    try:
        wait_until(lambda: told.exists() and told.read_text())
        child = int(told.read_text())
        assert is_running(child)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    wait_until(lambda: not is_running(child))


def test_a_child_whose_parent_is_gone_already_imports_nothing(slow_module: Path) -> None:
    told = slow_module / "pid"
    environment = {**os.environ, "PYTHONPATH": str(slow_module), "AGENTRL_PARENT_PID": "1"}
    command = [sys.executable, *CHILD, "slow_module", str(told)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert result.returncode == 1
    assert "the parent process ended before this one was up" in result.stderr
    assert not told.exists()


STARTS = ("ChildProcess.start", "spawn", "spawn_alone", "ProcessLaunch")
PASSES_ON = ("process/remote.py", "process/local_place.py", "process/starting.py", "orchestration/engines.py")


def starts(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls that start a process of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in STARTS:
            yield node


def test_every_process_of_a_run_is_started_so() -> None:
    """Each module that starts one names `CHILD`.

    Those that only pass arguments on are exceptions, and the keeper of sandboxes, which has to end what it holds when
    its parent has ended: its control connection tells it (`test_a_keeper_ends_all_when_its_parent_is_killed`).
    """
    package = Path(agentrl.__file__).parent
    exceptions = {package / name for name in (*PASSES_ON, "sandbox/starting.py")}
    assert all(path.is_file() for path in exceptions)
    files = [path for path in package.rglob("*.py") if path not in exceptions]
    starting = [path for path in files if list(starts(ast.parse(path.read_text())))]
    assert len(starting) >= 5
    assert [path.name for path in starting if "*CHILD" not in path.read_text()] == []
