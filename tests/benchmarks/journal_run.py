"""One run for `journal_overhead`: ``python -m tests.benchmarks.journal_run RECIPE [KEY=VALUE]``."""

from __future__ import annotations

import sys
from pathlib import Path

from agentrl.orchestration.config import load_run_config
from agentrl.orchestration.launch import start_run
from agentrl.orchestration.recorder import SilentObserver
from agentrl.process.loop import run_async
from agentrl.process.parent import die_with_parent


def main() -> None:
    recipe, *overrides = sys.argv[1:]
    die_with_parent()
    run_async(start_run(load_run_config(Path(recipe), overrides), SilentObserver()))


if __name__ == "__main__":
    main()
