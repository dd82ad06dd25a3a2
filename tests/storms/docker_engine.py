"""The Docker engine of a benchmark: the one that DOCKER_HOST names, or one that is started for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IMAGE = "agentrl-python:local"
_PROGRAM = Path(__file__).parents[2] / "deploy" / "docker" / "engine.py"


@contextmanager
def docker_engine() -> Iterator[str]:
    """Its URL."""
    if given := os.environ.get("DOCKER_HOST"):
        yield given
        return
    started = subprocess.run([sys.executable, str(_PROGRAM), "start"], check=True, stdout=subprocess.PIPE, text=True)
    try:
        yield started.stdout.strip()
    finally:
        subprocess.run([sys.executable, str(_PROGRAM), "stop"], check=True)
