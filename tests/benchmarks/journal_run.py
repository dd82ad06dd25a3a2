"""One run for `journal_overhead`, in a process of its own.

``python -m tests.benchmarks.journal_run FIGURES RECIPE [KEY=VALUE]`` writes to the file FIGURES, as JSON, the folder of
the run and the processor time of this process.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from agentrl.orchestration.config import load_run_config
from agentrl.orchestration.launch import start_run
from agentrl.orchestration.recorder import SilentObserver
from agentrl.process.loop import run_async
from agentrl.process.parent import die_with_parent


def main() -> None:
    figures, recipe, *overrides = sys.argv[1:]
    die_with_parent()
    run = run_async(start_run(load_run_config(Path(recipe), overrides), SilentObserver())).run
    result = {"run": str(run), "processor_s": time.process_time()}
    Path(figures).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
