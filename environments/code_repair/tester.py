"""The program that tests a solution where the solution cannot reach it; run in a sandbox, from its text.

A request comes by stdin and is never on a disk: the tests, the solution's source, and a nonce. The solution runs in a
child process, which is given arguments and asked for values; what is expected stays here. Before the child is started
this process makes itself undumpable: a process of the same user can then neither read its memory nor open its files
through ``/proc``. It can kill it, and then there is no verdict. Values come back as literals and are parsed as such: no
code of the solution runs here, not even an ``__eq__``. The verdict is a line on stdout that begins with the nonce; a
line with the nonce alone comes before the child is started, so that a tester that cannot run is told from a killed one.
"""

from __future__ import annotations

import ast
import ctypes
import json
import os
import select
import subprocess
import sys
import time
from typing import Any

_PR_SET_DUMPABLE = 4
_MOST_ANSWER_BYTES = 1 << 20
_MOST_TOLD = 3
_MOST_SHOWN = 80  # characters of a value


class FailedError(Exception):
    """The solution gave no value, and gives none any more."""


class Candidate:
    """A process that runs the solution. Once it has failed to answer, all further calls fail, too."""

    def __init__(self, program: str, solution: str, call_s: float) -> None:
        self._call_s = call_s
        calls, self._calls = os.pipe()
        self._answers, answers = os.pipe()
        command = [sys.executable, "-I", "-S", "-c", program, str(calls), str(answers)]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=(calls, answers))
        os.close(calls)
        os.close(answers)
        os.set_blocking(self._calls, False)
        self._unsent = _line(solution)
        self._received = b""
        self._lost = ""

    def call(self, function: str, *arguments: object) -> Any:
        """What a function of the solution gives. Raises FailedError."""
        if not self._lost:
            self._lost = self._exchange(_line([function, repr(arguments)]), time.monotonic() + self._call_s)
        if self._lost:
            raise FailedError(self._lost)
        line, _, self._received = self._received.partition(b"\n")
        return _value(line)

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()

    def _exchange(self, call: bytes, until: float) -> str:
        """Send a call and wait for a line; returns what went wrong."""
        self._unsent += call
        while b"\n" not in self._received:
            readable, writable, _ = select.select(
                [self._answers], [self._calls] if self._unsent else [], [], max(0.0, until - time.monotonic())
            )
            if not readable and not writable:
                return f"no answer within {self._call_s:g} s"
            if writable and not self._send():
                return "the process ended"
            if readable and not self._receive():
                return "the process ended"
            if len(self._received) > _MOST_ANSWER_BYTES:
                return "the answer is too long"
        return ""

    def _send(self) -> bool:
        try:
            self._unsent = self._unsent[os.write(self._calls, self._unsent) :]
        except BrokenPipeError:
            return False
        return True

    def _receive(self) -> bool:
        data = os.read(self._answers, 65536)
        self._received += data
        return bool(data)


def _line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _value(line: bytes) -> Any:
    try:
        answer = json.loads(line)
        if "error" in answer:
            raise FailedError(str(answer["error"]))
        return ast.literal_eval(str(answer["value"]))
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        raise FailedError("the value is no literal") from None


def run_cases(candidate: Candidate, entry: str, cases: list[list[str]]) -> list[str]:
    """What is wrong with each case that fails; a case is the arguments and the value that is expected, as literals."""
    wrong = []
    for arguments, expected in cases:
        shown = f"{entry}{arguments}".replace(",)", ")")
        try:
            value = candidate.call(entry, *ast.literal_eval(arguments))
        except FailedError as error:
            wrong.append(f"{shown} failed: {error}")
            continue
        if value != ast.literal_eval(expected):
            wrong.append(f"{shown} gave {_shown(value)}, not {expected}")
    return wrong


def run_check(candidate: Candidate, entry: str, check: str) -> list[str]:
    """What is wrong by a function ``check(candidate)``, whose source this is, or nothing."""
    names: dict[str, Any] = {"__name__": "check"}
    exec(compile(check, "check", "exec"), names)
    try:
        names["check"](lambda *arguments: candidate.call(entry, *arguments))
    except Exception as error:  # noqa: BLE001 - a value of the wrong type makes a check fail in any way
        return [f"{type(error).__name__}: {_shown(error)}"]
    return []


def _shown(value: object) -> str:
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


def main() -> None:
    """Test a solution and say what came of it."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process cannot be made undumpable")
    request = json.loads(sys.stdin.buffer.read())
    sys.stdout.write(request["nonce"] + "\n")
    sys.stdout.flush()
    candidate = Candidate(request["candidate"], request["solution"], request["call_s"])
    if "check" in request:
        num_tests, wrong = 1, run_check(candidate, request["entry"], request["check"])
    else:
        num_tests, wrong = len(request["cases"]), run_cases(candidate, request["entry"], request["cases"])
    candidate.end()
    verdict = {"tests": num_tests, "passed": num_tests - len(wrong), "wrong": wrong[:_MOST_TOLD]}
    sys.stdout.write(request["nonce"] + json.dumps(verdict) + "\n")


if __name__ == "__main__":
    main()
