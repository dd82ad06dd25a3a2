"""Has a solution tested by the tester, in whichever sandbox, and reads the verdict."""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.sandbox import Command, CommandResult

TESTER = Path(__file__).with_name("tester.py").read_text()
_CANDIDATE = Path(__file__).with_name("candidate.py").read_text()
_MOST_VERDICT_BYTES = 65536


class Suite(Protocol):
    """What a solution is tested by."""

    def asked(self) -> dict[str, Any]:
        """Its part of the request to the tester: plain JSON."""


@dataclass(frozen=True, slots=True)
class Cases:
    """Calls of a function and the values that they must give, all as Python literals.

    Example: ``Cases("add", (("(2, 3)", "5"),))``.
    """

    entry: str
    cases: tuple[tuple[str, str], ...]

    def asked(self) -> dict[str, Any]:
        """Entry and cases."""
        return {"entry": self.entry, "cases": self.cases}


@dataclass(frozen=True, slots=True)
class Check:
    """The source of a function ``check(candidate)`` that raises if the function that it is given is wrong.

    Its calls go to the process of the solution; `source` itself runs in the tester, so it must be trusted.
    """

    entry: str
    source: str

    def asked(self) -> dict[str, Any]:
        """Entry and source."""
        return {"entry": self.entry, "check": self.source}


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many tests a solution passed, and what is wrong with the first that it did not pass.

    Example: ``Verdict(3, 2, ("add(2, 3) gave 6, not 5",))``.
    """

    tests: int
    passed: int
    wrong: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether it passed all."""
        return self.passed == self.tests


async def try_solution(
    run: Callable[[Command], Awaitable[CommandResult]], solution: bytes, suite: Suite, call_s: float, total_s: float
) -> Verdict | None:
    """What the tester finds, None if it was kept from saying it: by its deadline, or by the solution's doing.

    `run` carries out a command in a sandbox that has a ``python3``. A call of the solution may take `call_s`, all
    together `total_s`.

    Raises:
        EpisodeError: boundary sandbox, kind verifier: the tester could not run there.
    """
    nonce = secrets.token_hex(16)
    request = suite.asked() | {
        "nonce": nonce,
        "candidate": _CANDIDATE,
        "solution": solution.decode(errors="replace"),
        "call_s": call_s,
    }
    command = Command(
        ("python3", "-I", "-S", "-c", TESTER),
        stdin=json.dumps(request).encode(),
        timeout_s=total_s,
        max_output_bytes=_MOST_VERDICT_BYTES,
    )
    result = await run(command)
    lines = result.stdout.decode(errors="replace").splitlines()
    if nonce not in lines:
        raise EpisodeError(Boundary.SANDBOX, "verifier", f"the tester did not begin: {result.text[-300:].strip()}")
    said = next((line.removeprefix(nonce) for line in lines if line.startswith(nonce + "{")), None)
    if said is None:
        return None
    found = json.loads(said)
    return Verdict(found["tests"], found["passed"], tuple(found["wrong"]))
