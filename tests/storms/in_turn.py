"""Two programs that have the machine in turn, a moment each, so that what else it does befalls both alike."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MOMENT_S = 0.5
LIMIT_S = 1800.0
_POLL_S = 0.02
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Program:
    """A process with its descendants, which are stopped and continued as one; `moments` are when they ran.

    `processor_s` is the processor time of each of its processes at the end of the last moment that it saw.

    Example: moments from second 10 to 12 and from 14 to 16 make three active seconds up to second 15.
    """

    process: subprocess.Popen[bytes]
    moments: list[tuple[float, float]] = field(default_factory=list)
    processor_s: dict[int, float] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    def active_s(self, until: float) -> float:
        """Seconds that it has run up to a time of the clock that `time.time` reads."""
        return sum(max(0.0, min(end, until) - start) for start, end in self.moments)

    def run_for(self, moment_s: float) -> None:
        """Let it run for a moment, or to its end."""
        started = time.time()
        _send(self.process.pid, signal.SIGCONT)
        while time.time() < started + moment_s and not self.is_over:
            time.sleep(min(_POLL_S, max(0.0, started + moment_s - time.time())))
        _send(self.process.pid, signal.SIGSTOP)
        self.moments.append((started, time.time()))
        self.processor_s |= processor_s(family(self.process.pid))


def run_in_turn(programs: Sequence[Program], are_done: Callable[[], bool], moment_s: float = MOMENT_S) -> None:
    """Give all programs moments in turn until enough was seen, then let each run to its end by itself.

    Raises:
        SystemExit: that has not come after `LIMIT_S`; all programs have been killed.
    """
    limit = time.time() + LIMIT_S
    for program in programs:
        _send(program.process.pid, signal.SIGSTOP)
    while not are_done() and time.time() < limit:
        for program in programs:
            program.run_for(moment_s)
    for program in programs:
        program.run_for(max(0.0, limit - time.time()))
    if not all(program.is_over for program in programs):
        for program in programs:
            _send(program.process.pid, signal.SIGKILL)
        raise SystemExit(f"programs that run in turn are not done after {LIMIT_S:g} s; look at their logs")


def _send(pid: int, number: signal.Signals) -> None:
    """Signal a process and its descendants, parents first, until none is new."""
    seen: set[int] = set()
    while new := family(pid) - seen:
        for member in sorted(new):
            with suppress(ProcessLookupError):
                os.kill(member, number)
        seen |= new


def processor_s(members: set[int]) -> dict[int, float]:
    """Seconds that each has used so far; those that have ended are left out."""
    seconds = {}
    for member in members:
        with suppress(OSError):
            user, system = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()[11:13]
            seconds[member] = (int(user) + int(system)) / _TICKS_A_SECOND
    return seconds


def family(pid: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    family, found = set(), [pid]
    while found:
        member = found.pop()
        family.add(member)
        found += children.get(member, [])
    return family
