"""An event loop that stands still is found, with the line of the plugin that holds it up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from agentrl.process.standstill import _TICKS, _Watch

LIMIT_S = 120.0
PLUGIN = """
import time

def hold():
    time.sleep(3600)
"""
PROGRAM = """
import asyncio, sys
import plugin
from agentrl.process.loop import run_async
from agentrl.process.standstill import ended_by_standstill

def tell(frame, place):
    print(f"{frame.f_code.co_name}: {place}", flush=True)
    if sys.argv[1] == "raises":
        raise RuntimeError("nobody can be told")

async def main():
    with ended_by_standstill(0.4, tell):
        await asyncio.sleep(0.01)
        plugin.hold()

run_async(main())
"""


def run(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    (folder / "plugin.py").write_text(PLUGIN)
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "program.py"), how]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_a_loop_that_a_plugin_holds_up_ends_the_process_by_name_of_its_line(tmp_path: Path) -> None:
    result = run(tmp_path, "tells")
    assert result.returncode == 1
    assert result.stdout == f"hold: line 5 of {tmp_path / 'plugin.py'}, in hold\n"


def test_it_ends_even_if_nobody_can_be_told(tmp_path: Path) -> None:
    assert run(tmp_path, "raises").returncode == 1


class Ticks:
    """A watch's clock in a test's hands: what happens in each tick, and over behind the last."""

    def __init__(self, *ticks: Callable[[], None]) -> None:
        self._ticks = list(ticks)

    def wait(self, seconds: float) -> bool:
        if not self._ticks:
            return True
        self._ticks.pop(0)()
        return False


async def found(*ticks: Callable[[_Watch], None]) -> bool:
    """Whether a watch finds a standstill in the course of these ticks."""
    watch, ended = _Watch(1.0, lambda frame, place: None), []
    watch._end = lambda: ended.append(True)  # type: ignore[method-assign]
    watch.is_over = Ticks(*(lambda tick=tick: tick(watch) for tick in ticks))  # type: ignore[assignment]
    watch.run()
    await asyncio.sleep(0)
    return bool(ended)


def still(watch: _Watch) -> None:
    """The loop does not go round."""


def turns(watch: _Watch) -> None:
    """It does."""
    watch._turn()


async def test_only_so_many_ticks_in_a_row_are_a_standstill() -> None:
    assert await found(*[still] * (_TICKS + 1))
    assert not await found(*[still] * _TICKS)
    assert not await found(*[still] * (_TICKS - 1), turns, *[still] * (_TICKS - 1))
