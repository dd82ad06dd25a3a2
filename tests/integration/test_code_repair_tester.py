"""Solutions that are wrong and want to pass, tested in real sandboxes."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest

from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.starting import running_keeper
from agentrl.types.errors import EpisodeError
from agentrl.types.sandbox import Command, CommandResult, Ended, SandboxSpec
from agentrl_environments.code_repair import suites
from agentrl_environments.code_repair.suites import Cases, Check, Suite, Verdict, try_solution

SECRET = "the value 8231 that is expected"
ADD = Cases("f", (("(2, 3)", "5"), ("(20, 22)", "42")))
RIGHT = "def f(a, b):\n    return a + b\n"
FAKE = json.dumps({"tests": 2, "passed": 2, "wrong": []})
# Finds in the memory of the tester what is expected, and answers that.
SPY = r"""
import os, re
def f(a, b):
    parent = os.getppid()
    for line in open(f"/proc/{parent}/maps"):
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if " rw" in line:
            with open(f"/proc/{parent}/mem", "rb", 0) as memory:
                memory.seek(first)
                found = re.search(rb"the value \d+ that is expected", memory.read(last - first))
            if found:
                return found[0].decode()
"""
ATTACKS = {
    "exit at import": "import sys; sys.exit(0)",
    "exit of the process": "import os\ndef f(a, b): os._exit(0)",
    "exit hooks": f"import atexit\natexit.register(print, {FAKE!r})\ndef f(a, b): return 0",
    "prints a verdict": f"import sys\nprint({FAKE!r})\nsys.stderr.write({FAKE!r})\ndef f(a, b): return 0",
    "writes to every file": f"""
import os
def f(a, b):
    for number in range(64):
        try:
            os.write(number, b'{{"value": "5"}}\\n' * 2 + {FAKE.encode()!r} + b"\\n")
        except OSError:
            pass
""",
    "equal to everything": """
class Any:
    __eq__ = lambda *_: True
    __ne__ = lambda *_: False
def f(a, b): return Any()
""",
    "number equal to everything": """
class Any(int):
    __eq__ = lambda *_: True
    __ne__ = lambda *_: False
    __hash__ = int.__hash__
def f(a, b): return Any(0)
""",
    "patches what compares": """
import ast, builtins, json, operator
json.dumps = lambda *_: '{"value": "True"}'
ast.literal_eval = lambda _: True
builtins.repr = lambda _: "True"
operator.ne = lambda *_: False
def f(*_): return True
""",
    "text of a call": "class Call:\n    __repr__ = lambda _: '__import__(\"os\")._exit(0)'\ndef f(a, b): return Call()",
    "deep literal": "class Deep:\n    __repr__ = lambda _: '[' * 100000\ndef f(a, b): return Deep()",
    "endless answer": "def f(a, b): return 'x' * 50_000_000",
    "never answers": "import time\ndef f(a, b): time.sleep(1000)",
    "kills the tester": "import os, signal\ndef f(a, b): os.kill(os.getppid(), signal.SIGKILL)",
    "stops the tester": "import os, signal\ndef f(a, b): os.kill(os.getppid(), signal.SIGSTOP)",
    "reads the memory of the tester": SPY,
    "reads every file": """
import glob, os, re
def found():
    for file in [*glob.glob("/proc/*/*"), *glob.glob("/proc/*/fd/*"), *glob.glob("/tmp/**", recursive=True)]:
        try:
            number = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
            match = re.search(rb"the value \\d+ that is expected", os.read(number, 1 << 20))
            if match:
                return match[0].decode()
        except OSError:
            pass
def f(a, b): return found()
""",
}
FIND_SECRET = Cases("f", (("(2, 3)", repr(SECRET)),))
SUITES = {"reads every file": FIND_SECRET, "reads the memory of the tester": FIND_SECRET}
CHECK = Check("f", "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(20, 22) == 42\n")


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict | None]:
    """What came of every attack by cases, and of every attack by a check."""
    return asyncio.run(_play())


async def _play() -> dict[str, Verdict | None]:
    async with running_keeper(SandboxConfig(kind="bwrap"), "attacks") as host:
        at_once = asyncio.Semaphore(4)

        async def attempt(solution: str, suite: Suite, total_s: float = 60.0, call_s: float = 5.0) -> Verdict | None:
            async with at_once:
                sandbox = await host.open(SandboxSpec())
                try:
                    run = partial(sandbox.run, effect_id="try")
                    return await try_solution(run, solution.encode(), suite, call_s=call_s, total_s=total_s)
                finally:
                    await sandbox.close()

        played = {}  # what is to come to its end, the spy and the right ones, may take long on a busy machine
        for name, solution in ATTACKS.items():
            total_s = 15.0 if name == "stops the tester" else 60.0
            call_s = 60.0 if solution is SPY else 5.0
            played[f"{name} by cases"] = attempt(solution, SUITES.get(name, ADD), total_s, call_s)
            played[f"{name} by a check"] = attempt(solution, CHECK, total_s)
        for name, suite in (("cases", ADD), ("a check", CHECK)):
            played[f"right by {name}"] = attempt(RIGHT, suite, call_s=60.0)
        tester = suites.TESTER
        found = await asyncio.gather(*played.values())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(suites, "TESTER", tester.replace("prctl(_PR_SET_DUMPABLE, 0,", "prctl(_PR_SET_DUMPABLE, 1,"))
            unprotected = await attempt(SPY, FIND_SECRET, call_s=60.0)
        return dict(zip(played, found, strict=True)) | {"the tester can be read": unprotected}


@pytest.mark.parametrize("by", ["by cases", "by a check"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_passes(verdicts, attack, by):
    verdict = verdicts[f"{attack} {by}"]
    assert verdict is None or not verdict.is_right


@pytest.mark.parametrize("by", ["by cases", "by a check"])
def test_a_right_solution_passes(verdicts, by):
    assert verdicts[f"right {by}"].is_right


def test_the_spy_would_pass_if_the_tester_could_be_read(verdicts):
    """So that the test of it is able to fail."""
    assert verdicts["the tester can be read"] == Verdict(1, 1)
    assert "PermissionError" in verdicts["reads the memory of the tester by cases"].wrong[0]


def test_a_killed_tester_says_nothing(verdicts):
    assert verdicts["kills the tester by cases"] is None


def test_wrong_values_are_told():
    async def told(command: Command) -> CommandResult:
        nonce = json.loads(command.stdin)["nonce"]
        out = f"{nonce}\n{nonce}{json.dumps({'tests': 2, 'passed': 1, 'wrong': ['f(2, 3) gave 6, not 5']})}\n".encode()
        return CommandResult(0, out, b"", len(out), 0, 0.1)

    verdict = asyncio.run(try_solution(told, b"", ADD, 1.0, 1.0))
    assert verdict == Verdict(2, 1, ("f(2, 3) gave 6, not 5",))


def test_a_sandbox_without_python_is_a_failure_and_no_verdict():
    async def lacking(command: Command) -> CommandResult:
        said = b"sh: python3: not found"
        return CommandResult(127, b"", said, 0, len(said), 0.1, Ended.EXITED)

    with pytest.raises(EpisodeError, match="the tester did not begin: sh: python3: not found"):
        asyncio.run(try_solution(lacking, b"", ADD, 1.0, 1.0))
