"""Recipes that ask for what a cluster cannot give end with one line and leave nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from agentrl.process.ports import free_port
from agentrl.testing.tiny import make_tiny_model
from tests.integration import runs


def refused(folder: Path, *overrides: str) -> str:
    """The one line with which a run ends that leaves no folder."""
    model = make_tiny_model(folder / "model")
    result: subprocess.CompletedProcess[str] = runs.agentrl(
        *runs.train_arguments(folder, model, "policies.main.engine.kind=embedded", "runtime.kind=ray", *overrides)
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert not list((folder / "runs").glob("*")), result.stderr
    return " ".join(result.stderr.split())


def test_a_recipe_for_a_cluster_that_is_not_there(cluster, tmp_path: Path):
    address = f"{cluster.host}:{free_port(cluster.host)}"
    words = refused(tmp_path, f"runtime.address={address}")
    assert f"no Ray cluster can be joined at runtime.address = '{address}'" in words
    assert "`ray start --head`" in words


def test_a_recipe_that_asks_for_gpus_that_are_not_there(cluster, shared: Path):
    folder = shared / "gpus"
    folder.mkdir()
    words = refused(folder, f"runtime.address={cluster.address}", "runtime.engines.gpus=1")
    assert "'engine' asks for, 1 CPU, 1 GPU. There is" in words
    assert f"{cluster.nodes[0].host}: 4 CPU" in words


def test_a_recipe_whose_run_folder_nodes_do_not_see(cluster, tmp_path: Path):
    words = refused(tmp_path, f"runtime.address={cluster.address}")
    assert "does not see the run folder" in words
    assert "set runs_folder" in words


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("policies.main.publish.transport.kind=tensors", 'set it to "broadcast", or "disk"'),
        ("runtime.address=ray://10.0.0.1:10001", "ray job submit"),
    ],
)
def test_a_recipe_that_no_cluster_could_run(tmp_path: Path, override: str, remedy: str):
    assert remedy in refused(tmp_path, override)
