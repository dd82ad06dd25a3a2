from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from agentrl.weights.sender import Sender

READ = "import sys; from agentrl.engine.unpickler import load_named_tensors; print(load_named_tensors(sys.argv[1]))"


def test_every_reader_of_a_bucket_has_a_payload_of_its_own(tmp_path: Path) -> None:
    save_file({"a": torch.full((3,), 7.0)}, tmp_path / "model.safetensors")
    sender = Sender()
    sender.open(str(tmp_path), 1000)
    (payloads,) = sender.share(3, "cpu")
    for payload in payloads:
        reader = subprocess.run([sys.executable, "-c", READ, payload], capture_output=True, text=True, check=False)
        assert reader.stdout == "{'a': tensor([7., 7., 7.])}\n", reader.stderr
