from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from trainer_reference import make_odd_model, plain_network
from transformers import PreTrainedModel

from agentrl.testing.tiny_moe import make_tiny_moe_model


@pytest.fixture(scope="session")
def network(tiny_model: Path) -> PreTrainedModel:
    """The tiny model as transformers alone runs it; read only."""
    return plain_network(tiny_model)


@pytest.fixture(scope="session")
def odd_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with an output embedding of its own and fewer key heads than query heads; read only."""
    return make_odd_model(tiny_model, tmp_path_factory.mktemp("odd") / "model")


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of 8 experts, 2 for each token; read only."""
    return make_tiny_moe_model(tmp_path_factory.mktemp("moe") / "model")


@pytest.fixture(scope="session")
def moe_network(moe_model: Path) -> PreTrainedModel:
    """The tiny model of experts as transformers alone runs it; read only."""
    return plain_network(moe_model)


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process as the only rank."""
    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
