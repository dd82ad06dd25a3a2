"""A program that writes a line for each step it has done, watched: when each step was there, and what it had cost."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.storms.in_turn import family, processor_s

_LOOK_S = 0.05
LIMIT_S = 1200.0


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds since the program's start at which each step was done, and processor time of all its processes then."""

    at_s: tuple[float, ...]
    processor_s: tuple[float, ...]

    @property
    def processor_s_per_step(self) -> float:
        """Processor time of a step, in the mean of all but the first."""
        return (self.processor_s[-1] - self.processor_s[0]) / (len(self.processor_s) - 1)

    def reached_s(self, step: float) -> float:
        """When a fractional step was reached; step 0 is the start.

        Example: with steps at 10 and 12 s, step 1.5 was reached after 11 s.
        """
        times = (0.0, *self.at_s)
        whole = min(int(step), len(times) - 2)
        return times[whole] + (step - whole) * (times[whole + 1] - times[whole])


def watch(command: Sequence[str], lines: Path, mark: str, log: Path, environment: Mapping[str, str]) -> Steps:
    """Run a program to its end; a line of `lines` that holds `mark` says that a step is done.

    Raises SystemExit if it fails, or is not done within `LIMIT_S`.
    """
    at_s: list[float] = []
    used_s: list[float] = []
    seen: dict[int, float] = {}  # also of processes that have ended: a family's time only grows
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=dict(environment))
        is_over = False
        while not is_over:
            is_over = process.poll() is not None  # the last lines may come between two looks
            num_done = lines.read_text().count(mark) if lines.exists() else 0
            if num_done > len(at_s):
                seen |= processor_s(family(process.pid))
                at_s += [time.monotonic() - started] * (num_done - len(at_s))
                used_s += [sum(seen.values())] * (num_done - len(used_s))
            if time.monotonic() - started > LIMIT_S:
                process.kill()
                raise SystemExit(f"{command[1]} is not done after {LIMIT_S:g} s; its output is in {log}")
            time.sleep(0.0 if is_over else _LOOK_S)
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:4])}... failed:\n{log.read_text(errors='replace')[-3000:]}")
    if len(at_s) < 2:
        raise SystemExit(f"{' '.join(command[:4])}... has done {len(at_s)} steps, too few to compare; see {log}")
    return Steps(tuple(at_s), tuple(used_s))
