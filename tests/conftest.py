from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from agentrl.testing.tiny import make_tiny_model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine-server",
        default="embedded",
        help="what the engine tests run against: embedded, sglang (see deploy/sglang-cpu), or a base URL",
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3-style model with tokenizer; read only."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
