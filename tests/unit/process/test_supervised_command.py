from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from agentrl.process.parent import supervised_environment
from agentrl.testing.processes import is_running

SUPERVISED = [sys.executable, "-m", "agentrl.process.supervised"]
PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_a_command_ends_with_the_process_that_started_it() -> None:
    command = [sys.executable, "-c", PARENT, *SUPERVISED, "sleep", "600"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    _wait_until(lambda: Path(f"/proc/{child}/comm").read_text().strip() == "sleep")
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    _wait_until(lambda: not is_running(child))


def test_a_program_that_is_not_there_is_named() -> None:
    result = subprocess.run([*SUPERVISED, "/no/such/program"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "cannot start /no/such/program: No such file or directory" in result.stderr


def test_a_command_whose_parent_is_gone_already_does_not_begin() -> None:
    orphan = {**os.environ, "AGENTRL_PARENT_PID": "1"}
    result = subprocess.run([*SUPERVISED, "true"], env=orphan, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "the parent process ended before this one was up" in result.stderr


def test_who_started_a_command_is_no_business_of_what_that_starts() -> None:
    script = 'test -z "$AGENTRL_PARENT_PID"'
    assert subprocess.run([*SUPERVISED, "sh", "-c", script], env=os.environ | supervised_environment()).returncode == 0


def _wait_until(condition: object) -> None:
    until = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.01)
