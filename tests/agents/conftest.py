"""Real agents, unmodified, which ``make test-agents`` installs: each in a sandbox whose only way out is one socket."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agentrl.sandbox.client import KeeperHost
from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.starting import running_keeper
from tests.agents.cases import VENV, read_only_folders


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of them: they are run where the agents are."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.agents)


@pytest_asyncio.fixture
async def host() -> AsyncIterator[KeeperHost]:
    """Sandboxes that see the agents."""
    assert (VENV / ".installed").exists(), f"{VENV} is not there; run `make test-agents`, which installs it"
    config = SandboxConfig(options={"read_only": [str(path) for path in read_only_folders()]})
    async with running_keeper(config, "agents") as running:
        yield running


@pytest_asyncio.fixture
async def socket() -> AsyncIterator[Path]:
    """Where the agents' calls come out; its folder's name is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="agents-", dir="/tmp") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder) / "socket"
