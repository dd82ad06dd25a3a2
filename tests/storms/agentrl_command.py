"""The program as its users call it, for benchmarks and tests that play whole recipes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def run_agentrl(*arguments: str | Path) -> None:
    """Run the program, its output on stderr beside ours. Raises SystemExit if it fails."""
    words = list(map(str, arguments))
    done = subprocess.run([sys.executable, "-m", "agentrl.cli.main", *words], stdout=sys.__stderr__, check=False)
    if done.returncode:
        raise SystemExit(f"agentrl {json.dumps(words)} ended with {done.returncode}")
