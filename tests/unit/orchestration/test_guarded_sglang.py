from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import yaml

# In place of the server: shows what it was started with, and what it reads.
SERVER = """
import os, sys, yaml
path = sys.argv[sys.argv.index("--config") + 1]
first, again = (open(path).read() for _ in range(2))
print(yaml.safe_dump({
    "argv": sys.argv[1:], "config": yaml.safe_load(first), "again": yaml.safe_load(again),
    "environment": dict(os.environ), "proc": open("/proc/self/cmdline").read(),
}))
"""


def _run(link: Path, *more: str) -> dict:
    command = [sys.executable, "-m", "agentrl.orchestration.guarded_sglang", "TOKEN", str(link)]
    server = [sys.executable, "-c", SERVER, "--host", "127.0.0.1", *more]
    result = subprocess.run(
        [*command, *server], env=os.environ | {"TOKEN": "c0ffee"}, capture_output=True, text=True, check=True
    )
    return yaml.safe_load(result.stdout)


def test_the_server_reads_its_token_and_nobody_else_sees_it(tmp_path: Path) -> None:
    seen = _run(tmp_path / "engine.yaml", "--port", "3")
    assert seen["config"] == seen["again"] == {"api-key": "c0ffee"}
    assert seen["argv"][:4] == ["--host", "127.0.0.1", "--port", "3"]
    assert "c0ffee" not in seen["proc"]
    assert "c0ffee" not in seen["environment"].values()


def test_nothing_of_the_token_is_left_on_the_disk(tmp_path: Path) -> None:
    for _ in range(2):  # an engine that is started again finds the name of the first
        _run(tmp_path / "engine.yaml")
    (left,) = tmp_path.iterdir()
    assert left.readlink().parent == Path("/proc/self/fd")


def test_the_output_is_for_nobody_else_to_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "agentrl.orchestration.guarded_sglang", "TOKEN", str(tmp_path / "engine.yaml")]
    with log.open("wb") as output:
        environment = os.environ | {"TOKEN": "c0ffee"}
        subprocess.run([*command, "true", "--host", "127.0.0.1"], env=environment, stdout=output, check=True)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_gloo_is_told_the_interface_that_has_the_address(tmp_path: Path) -> None:
    assert _run(tmp_path / "engine.yaml")["environment"]["GLOO_SOCKET_IFNAME"] == "lo"
