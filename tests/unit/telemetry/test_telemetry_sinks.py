from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from agentrl.telemetry.sinks import TensorBoardSink

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


_FULL = """
import pathlib, resource, sys
from agentrl.telemetry.sinks import TensorBoardSink
sink = TensorBoardSink(pathlib.Path(sys.argv[1]))
sink.write(1, {"trainer/loss": 0.25})
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
for step in range(2, 100):
    sink.write(step, {"trainer/loss": 0.25, "trainer/grad_norm": 0.5})
sink.close()
sink.close()
print(sink.lost)
"""


def test_metrics_that_tensorboards_disk_does_not_take_are_counted_and_told_once_and_raise_nothing(
    tmp_path: Path,
) -> None:
    ended = subprocess.run([sys.executable, "-c", _FULL, tmp_path], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert events.stat().st_size == 200, "the kernel refused in the midst of an event"
    told = ended.stderr.splitlines()
    assert [line.startswith(f"{events} cannot be written: ") for line in told] == [True, False]
    assert "free space" in told[0]
    lost = int(ended.stdout)
    assert told[1] == f"{lost} metrics are not in {events}"
    assert 2 * 97 <= lost <= 2 * 98, "all but the first steps"


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, clock=lambda: 7.0)
    from tensorboardX.proto.event_pb2 import Event  # behind the sink, which keeps it from loading torch

    sink.write(3, {"trainer/loss": 0.25, "policy": "main"})
    sink.write(4, {"trainer/loss": 0.5})
    sink.close()
    (events,) = tmp_path.glob("events.out.tfevents.*")
    data, read = events.read_bytes(), []
    while data:  # the record format of TensorFlow, as its own description has it
        length = int.from_bytes(data[:8], "little")
        read.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    assert read[0].file_version == "brain.Event:2"
    found = [(event.step, event.summary.value[0].tag, event.summary.value[0].simple_value) for event in read[1:]]
    assert found == [(3, "trainer/loss", 0.25), (4, "trainer/loss", 0.5)]
