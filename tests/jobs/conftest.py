"""Jobs of real job systems, which fixtures start on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.testing.tiny import make_tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of them: they need root, and programs that `make test-jobs` installs."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.jobs)


@pytest.fixture(scope="session")
def job_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all machines of a job system see."""
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="session")
def job_model(job_folder: Path) -> Path:
    """A tiny model that jobs train; read only."""
    return make_tiny_model(job_folder / "model")
