"""The trainer's forward pass, held against plain transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from agentrl.models.probe import Probe
from agentrl.models.verification import Verdict, verify
from agentrl.trainer.model import PolicyModel, load_network
from agentrl.trainer.packing import pack
from agentrl.trainer.sequence import TokenSequence
from agentrl.trainer.streaming import file_shapes
from agentrl.types.errors import ConfigError

_CHUNK_TOKENS = 16


def check_trainer(folder: Path) -> Verdict:
    """Whether the trainer computes what transformers computes of a folder's architecture.

    Two sequences of unequal length packed into one row, against each alone. Raises ConfigError if there is no model.
    """
    return verify(folder, "trainer", ("trainer", "algorithms", "weights"), measure_trainer)


@torch.no_grad()
def measure_trainer(probe: Probe) -> float:
    """Largest difference of a log-probability from the probe's, in nats.

    Raises:
        ConfigError: what the trainer writes would have other names than the files of this architecture.
    """
    policy = PolicyModel(load_network(probe.folder, torch.float64), _CHUNK_TOKENS)
    _check_names(policy, probe.folder)
    batch = pack([_sequence(text) for text in probe.texts], "cpu")
    expected = [
        logprobs_TV[:-1].gather(1, torch.from_numpy(text[1:])[:, None])[:, 0]
        for text, logprobs_TV in zip(probe.texts, probe.logprobs_TV, strict=True)
    ]
    return float((policy(batch, 1.0) - torch.cat(expected)).abs().max())


def _sequence(text: np.ndarray) -> TokenSequence:
    """A text whose every token but the first is scored."""
    selected = np.arange(1, len(text))
    unused = np.zeros(len(selected), np.float32)
    return TokenSequence(text.astype(np.int32), selected, unused, unused, unused, unused, unused, None)


def _check_names(policy: PolicyModel, folder: Path) -> None:
    expected: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            expected |= set(weights.keys())
    if strange := sorted(file_shapes(policy).keys() ^ expected):
        raise ConfigError(
            f"its files have names that agentrl does not know how to write: {len(strange)} differ, such as {strange[0]}"
        )
