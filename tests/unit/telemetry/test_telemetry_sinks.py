from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import pathlib, sys
from agentrl.telemetry.sinks import TensorBoardSink
sink = TensorBoardSink(pathlib.Path(sys.argv[1]))
sink.write(3, {"trainer/loss": 0.25, "policy": "main"})
sink.close()
assert "torch" not in sys.modules, "torch was loaded"
import torch
assert torch.ones(2).sum() == 2
"""


def test_metrics_for_tensorboard_are_written_without_torch_which_can_be_loaded_later(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", _PROGRAM, tmp_path], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"trainer/loss" in events.read_bytes()
