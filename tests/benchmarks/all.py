"""Runs benchmarks by name, one process each: python -m tests.benchmarks.all [NAME...]"""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = ("session_cost", "rollout_overhead", "async_vs_sync", "gate", "control", "replay_gap")


def main() -> None:
    names = sys.argv[1:] or BENCHMARKS
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        sys.exit(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    failed = [name for name in names if subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"]).returncode]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
