from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentrl.engine.main import run_engine
from agentrl.engine.options import EngineOptions
from agentrl.types.errors import ConfigError

BEYOND = f"cuda:{torch.cuda.device_count()}"


@pytest.mark.parametrize(
    ("device", "words"),
    [(BEYOND, f"--device {BEYOND}: torch .* finds {torch.cuda.device_count()} CUDA devices"), ("gpu", "is no device")],
)
def test_a_device_that_the_machine_lacks_is_named_before_anything_is_loaded(device: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_engine(EngineOptions(model=Path("/no/such/model"), port=0, device=device), supervised=True)
