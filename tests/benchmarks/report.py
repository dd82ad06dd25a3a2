"""The last line of every benchmark, and what it says of the machine."""

from __future__ import annotations

import json
import os
import platform
from typing import Any


def machine() -> str:
    """Processor model and number of cores that this process may use."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def report(benchmark: str, **figures: Any) -> None:
    """Print the benchmark's line."""
    print(json.dumps({"benchmark": benchmark, **figures, "machine": machine()}), flush=True)
