"""One run for `journal_overhead`, in a process of its own.

``python -m tests.benchmarks.journal_run FIGURES RECIPE [KEY=VALUE]`` writes to the file FIGURES, as JSON, the folder of
the run, the processor time of this process, and how much of that the journal's own code took, on the event loop and in
its thread.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from agentrl.journal.writer import JournalWriter
from agentrl.orchestration.config import load_run_config
from agentrl.orchestration.launch import start_run
from agentrl.orchestration.recorder import SilentObserver
from agentrl.process.parent import die_with_parent


class TimedWriter:
    """Sums up the processor time of what a writer does, wherever it is."""

    def __init__(self) -> None:
        self.busy_s = 0.0

    def install(self) -> None:
        """All writers are timed from here on."""
        add, write = JournalWriter._add, JournalWriter._write

        def timed_add(writer, *entry):
            started = time.thread_time()
            try:
                return add(writer, *entry)
            finally:
                self.busy_s += time.thread_time() - started

        def timed_write(writer, entries):
            started = time.thread_time()
            write(writer, entries)
            self.busy_s += time.thread_time() - started

        JournalWriter._add, JournalWriter._write = timed_add, timed_write  # type: ignore[method-assign]


def main() -> None:
    figures, recipe, *overrides = sys.argv[1:]
    die_with_parent()
    timed = TimedWriter()
    timed.install()
    run = asyncio.run(start_run(load_run_config(Path(recipe), overrides), SilentObserver())).run
    result = {"run": str(run), "processor_s": time.process_time(), "busy_s": timed.busy_s}
    Path(figures).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
