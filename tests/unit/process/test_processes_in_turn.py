from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.storms.in_turn import Program, run_in_turn

# A parent and its child, each of which writes down the clock all the time, until a file is there.
_NOTING = """
import os, sys, time
is_parent = os.fork() != 0
with open(f"{sys.argv[1]}-{is_parent}", "w") as file:
    while not os.path.exists(sys.argv[2]):
        file.write(f"{time.time()}\\n")
        file.flush()
        time.sleep(0.001)
if is_parent:
    os.wait()
"""


def test_programs_have_the_machine_in_turn_with_all_their_processes(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    programs = [
        Program(subprocess.Popen([sys.executable, "-c", _NOTING, str(tmp_path / name), str(stop)])) for name in "ab"
    ]

    def are_done() -> bool:
        if all(len(program.moments) >= 4 for program in programs):
            stop.touch()
        return stop.exists()

    run_in_turn(programs, are_done, moment_s=0.15)
    assert all(program.process.wait() == 0 for program in programs)
    for program, name in zip(programs, "ab", strict=True):
        first = program.moments[0][0]
        times = [
            float(t) for is_parent in (True, False) for t in (tmp_path / f"{name}-{is_parent}").read_text().split()
        ]
        inside = [any(start <= t <= end + 0.02 for start, end in program.moments) for t in times if t > first]
        assert inside
        assert all(inside)
    starts = sorted((start, name) for program, name in zip(programs, "ab", strict=True) for start, _ in program.moments)
    assert [name for _, name in starts] == ["a", "b"] * len(programs[0].moments)
    for start, end in programs[0].moments:
        assert all(end <= other_start or other_end <= start for other_start, other_end in programs[1].moments)


def test_active_seconds_are_those_of_moments_up_to_a_time() -> None:
    program = Program(subprocess.Popen([sys.executable, "-c", ""]), [(10.0, 12.0), (14.0, 16.0)])
    program.process.wait()
    assert [program.active_s(until) for until in (9.0, 11.0, 13.0, 15.0, 20.0)] == [0.0, 1.0, 2.0, 3.0, 4.0]
