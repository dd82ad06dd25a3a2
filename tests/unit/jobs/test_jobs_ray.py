from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys

import pytest

from agentrl.jobs.config import JobConfig, RayJobConfig
from agentrl.jobs.ray_jobs import RayJobs
from agentrl.jobs.submission import build_job
from agentrl.process.ports import free_port
from agentrl.types.errors import JobError

_WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
from agentrl.jobs.config import JobConfig
from agentrl.jobs.systems import SystemName, open_system
from agentrl.types.errors import JobError
try:
    open_system(SystemName(sys.argv[2]), JobConfig())
except JobError as error:
    print(error)
"""


def test_a_dry_run_prints_what_would_be_submitted(recipe, tmp_path):
    system = RayJobs(RayJobConfig(address="http://head:8265/"))
    config = JobConfig(environment={"A": "it's b"}, grace_s=7)
    spec = build_job(recipe, ["name=it"], config, system)
    words = shlex.split(system.render(spec).replace("\\\n", " "))
    options = dict(zip(words[3:11:2], words[4:11:2], strict=True))
    assert words[:3] == ["ray", "job", "submit"]
    assert options["--address"] == "http://head:8265"
    assert json.loads(options["--metadata-json"]) == {"agentrl": f"agentrl:it-seed0:{tmp_path}/runs/it-seed0"}
    variables = {"A": "it's b", "RAY_JOB_STOP_WAIT_TIME_S": "7"}
    assert json.loads(options["--runtime-env-json"]) == {"env_vars": variables}
    assert words[11:14] == ["--", "sh", "-c"]
    assert shlex.split(words[14]) == ["cd", str(tmp_path), "&&", "exec", *spec.argv]


def test_a_cluster_that_cannot_be_reached_is_named_with_what_to_do(monkeypatch):
    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", address)
    with pytest.raises(JobError) as unreachable:
        RayJobs(RayJobConfig()).jobs()
    said = str(unreachable.value)
    assert f"no Ray job server answers at {address}" in said
    assert all(word in said for word in ("ray start --head", "job.ray.address", "RAY_API_SERVER_ADDRESS"))


@pytest.mark.parametrize("address", ["head:8265", "ray://head:10001", "http://", "auto"])
def test_an_address_that_is_no_url_of_a_dashboard_is_refused(address):
    with pytest.raises(JobError, match=r"is no URL of a Ray dashboard: set job\.ray\.address"):
        RayJobs(RayJobConfig(address=address)).jobs()


def test_a_server_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr("agentrl.jobs.ray_jobs._Client.answer_s", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(JobError, match="no Ray job server answers"):
            RayJobs(RayJobConfig(address=address)).jobs()


@pytest.mark.parametrize(("package", "system", "extra"), [("ray", "ray", "ray"), ("yaml", "kubernetes", "train")])
def test_without_the_extra_the_error_says_what_to_install(package, system, extra):
    command = [sys.executable, "-c", _WITHOUT, package, system]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"pip install 'agentrl[{extra}]'" in done.stdout
