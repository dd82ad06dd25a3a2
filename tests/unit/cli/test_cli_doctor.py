"""What `agentrl doctor` says of clusters, by commands and a head that really are there or not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrl.cli.doctor_clusters import check_clusters
from agentrl.process.ports import free_port


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that alone is on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def put(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    os.chmod(folder / name, 0o755)


def test_what_is_not_here_is_said_with_the_remedy_and_is_no_fault(path: Path):
    found = list(check_clusters(None))
    assert all(is_well for is_well, _ in found)
    text = "\n".join(line for _, line in found)
    assert "no Slurm: sbatch is not on PATH; install" in text
    assert "no Kubernetes: kubectl is not on PATH; install" in text


def test_commands_that_are_here_say_their_versions_and_one_that_fails_reaches_no_cluster(path: Path):
    put(path, "sbatch", "echo slurm-wlm 22.05.8")
    put(path, "kubectl", "echo no such cluster >&2; exit 1")
    lines = [line for _, line in check_clusters(None)]
    assert f"Slurm: {path}/sbatch, slurm-wlm 22.05.8" in lines
    assert f"no Kubernetes: {path}/kubectl, no such cluster" in lines


def test_a_cluster_that_does_not_answer_is_a_fault_that_names_the_address(path: Path):
    address = f"127.0.0.1:{free_port()}"
    bad = [line for is_well, line in check_clusters(address) if not is_well]
    assert len(bad) == 1
    assert address in bad[0]
