"""The engine's forward passes over slots, held against plain transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from agentrl.engine.lora import NO_ADAPTER
from agentrl.engine.model import ServedModel
from agentrl.engine.options import EngineOptions
from agentrl.models.probe import Probe
from agentrl.models.verification import Verdict, verify

# Two chunks of prefill, of which the second ends where a text does or before, then decode steps.
_PREFILL_SHARE = (0.5, 0.3)


def check_engine(folder: Path) -> Verdict:
    """Whether the engine computes what transformers computes of a folder's architecture.

    Two texts in slots beside each other, each in two chunks and then token by token. Raises ConfigError if there is
    no model.
    """
    return verify(folder, "engine", ("engine", "weights"), measure_engine)


def measure_engine(probe: Probe) -> float:
    """Largest difference of a log-probability from the probe's, in nats, over the whole vocabulary."""
    options = EngineOptions(model=probe.folder, port=1, max_running_requests=len(probe.texts), deterministic=True)
    model = ServedModel(options)
    done, gaps = np.zeros(len(probe.texts), np.int64), []
    for sizes in _passes(probe):
        ids = np.zeros((len(sizes), max(sizes)), np.int64)
        for row, (text, size) in enumerate(zip(probe.texts, sizes, strict=True)):
            ids[row, :size] = text[done[row] : done[row] + size]
        hidden = model.forward(slice(0, len(sizes)), ids, done, np.full(len(sizes), NO_ADAPTER))
        for row, size in enumerate(sizes):
            logprobs_TV = model.logits(hidden[row, :size]).log_softmax(-1)
            expected_TV = probe.logprobs_TV[row][done[row] : done[row] + size]
            gaps.append((logprobs_TV - expected_TV).abs().max())
        done = done + sizes
    return float(torch.stack(gaps).max())


def _passes(probe: Probe) -> list[list[int]]:
    """How many tokens of each text every pass takes; no text is taken further than the shortest rest allows."""
    lengths = [len(text) for text in probe.texts]
    passes = [[int(length * share) for length in lengths] for share in _PREFILL_SHARE]
    rest = min(length - sum(sizes) for length, sizes in zip(lengths, zip(*passes, strict=True), strict=True))
    return passes + [[1] * len(lengths)] * rest
