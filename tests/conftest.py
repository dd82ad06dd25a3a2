from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from agentrl.testing.tiny import make_tiny_model

with suppress(ModuleNotFoundError):  # the machine of tests/gpu has no hypothesis, and none of its tests needs it
    from hypothesis import HealthCheck, settings

    settings.register_profile("agentrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("agentrl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine-server",
        default="embedded",
        help="what the engine tests run against: embedded, sglang (see deploy/sglang-cpu), or a base URL",
    )
    parser.addoption(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="what tests/gpu computes on: cuda by `make test-gpu`; cpu everywhere else, so that it has been run before",
    )


def pytest_configure(config: pytest.Config) -> None:
    """A GPU that was asked for and is not there is an error, not a reason to skip."""
    if config.getoption("--device") == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError(
                f"--device cuda: torch {torch.__version__} of {sys.executable} finds no CUDA device. Run "
                "`make test-gpu` on a machine where nvidia-smi lists a GPU, with PYTHON=/path/to/python whose torch is "
                "built for it"
            )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3-style model with tokenizer; read only."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
