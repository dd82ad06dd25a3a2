from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path

import torch
from safetensors.torch import save_file

from agentrl.weights.sender import Sender

READ = "import sys; from agentrl.engine.unpickler import load_named_tensors; print(load_named_tensors(sys.argv[1]))"


class _WatchedSender(Sender):
    """Counts the tensors of the last call that are alive when those of the next are made."""

    last: tuple[weakref.ref[torch.Tensor], ...] = ()
    alive = 0

    def _named(self, index: int) -> list[tuple[str, torch.Tensor]]:
        self.alive += sum(reference() is not None for reference in self.last)
        return super()._named(index)


def test_the_last_weights_are_given_up_before_the_next_take_memory(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    sender = _WatchedSender()
    sender.open(str(tmp_path), 1000)
    sender.share(1, "cpu")
    sender.last = tuple(weakref.ref(tensor) for _, tensor in sender._shared[0])
    sender.share(1, "cpu")
    assert len(sender.last) == 2
    assert sender.alive == 0


def test_every_reader_of_a_bucket_has_a_payload_of_its_own(tmp_path: Path) -> None:
    save_file({"a": torch.full((3,), 7.0)}, tmp_path / "model.safetensors")
    sender = Sender()
    sender.open(str(tmp_path), 1000)
    (payloads,) = sender.share(3, "cpu")
    for payload in payloads:
        reader = subprocess.run([sys.executable, "-c", READ, payload], capture_output=True, text=True, check=False)
        assert reader.stdout == "{'a': tensor([7., 7., 7.])}\n", reader.stderr
