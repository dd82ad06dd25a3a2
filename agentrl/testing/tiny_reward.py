"""Tiny reward models over the bodies of tiny models, made on the spot in a second."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

_CLASSES = {"Token": AutoModelForTokenClassification, "Sequence": AutoModelForSequenceClassification}


def make_tiny_reward_model(folder: Path, base: Path, seed: int = 0, labels: int = 1, form: str = "Token") -> Path:
    """Write a model of random weights, shaped as a tiny model with a head, with its tokenizer; returns the folder.

    `form` is that of its class: ``Token`` or ``Sequence``.
    """
    config = AutoConfig.from_pretrained(base, num_labels=labels)
    torch.manual_seed(seed)
    network = _CLASSES[form].from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0.0, 0.2)
    network.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((base / name).read_bytes())
    return folder
