"""An engine on another host than the run: what it is started with, and how weights come to it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_server import Reference
from fleet_sessions import LOAD_S, PROMPT
from safetensors.torch import load_file
from two_hosts import Host, two_hosts

from agentrl.inference.config import EmbeddedEngineConfig, SGLangEngineConfig, StartedEngineConfig
from agentrl.orchestration.commands import EngineLaunch, engine_command
from agentrl.process.ports import free_port
from agentrl.types.version import PolicyVersion

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
TOKEN = "c0ffee-of-the-run"


@contextmanager
def _engine(host: Host, model: Path, config: StartedEngineConfig, logs: Path) -> Iterator[str]:
    """An engine on a host, as a run starts it there; gives its URL at once."""
    launch = EngineLaunch("main", "far", model, PolicyVersion(0, 0), config, False, logs, token=TOKEN)
    port = free_port()
    command, environment = engine_command(launch, port, host.address)
    with launch.log.open("wb") as output:
        process = subprocess.Popen(
            host.command(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    try:
        yield f"http://{host.address}:{port}"
        assert process.poll() is None, launch.log.read_text()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _publish(host: Host, url: str, folder: Path, logs: Path) -> dict[str, Any]:
    """What `publish_across.py` has seen from a host."""
    script = [sys.executable, str(Path(__file__).with_name("publish_across.py"))]
    result = subprocess.run(
        host.command([*script, url, host.address, str(folder), str(logs)]),
        input=TOKEN,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=3 * LOAD_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def _command_lines() -> str:
    """Those of all processes, as everybody on the machine is shown them."""
    lines = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(process.read_text(errors="replace"))
        except OSError:
            continue  # it has ended
    return "\n".join(lines)


def _check(seen: dict[str, Any], folder: Path, reference: Reference) -> int:
    """Whether the engine was proven to serve the weights of a folder, and does; returns their bytes."""
    num_bytes = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert (seen["receipt"], seen["versions"], seen["sent_bytes"]) == ("0.1", ["0.1"], num_bytes)
    assert seen["logprobs"] == pytest.approx(reference.sampled(folder, PROMPT, seen["tokens"]), abs=1e-3)
    return num_bytes


def test_weights_reach_an_engine_on_another_host_and_its_receipt_proves_it(
    engine_model: Path, other_model: Path, reference: Reference, tmp_path: Path
) -> None:
    with two_hosts() as (here, there), _engine(there, engine_model, EmbeddedEngineConfig(), tmp_path) as url:
        seen = _publish(here, url, other_model, tmp_path)
        sent_bytes = here.sent_bytes()
        assert TOKEN not in _command_lines()
    assert sent_bytes >= _check(seen, other_model, reference)
    assert seen["answers"] == {"/pause_generation": 401, "/generate": 200, "/model_info": 200, "/health": 200}


@pytest.mark.timeout(800)
def test_weights_reach_sglang_on_another_host_which_has_its_token_from_no_command_line(
    sglang: Callable[[str], SGLangEngineConfig],
    engine_model: Path,
    other_model: Path,
    reference: Reference,
    tmp_path: Path,
) -> None:
    with two_hosts() as (here, there), _engine(there, engine_model, sglang("dense"), tmp_path) as url:
        seen = _publish(here, url, other_model, tmp_path)
        sent_bytes = here.sent_bytes()
        assert TOKEN not in _command_lines()
    assert sent_bytes >= _check(seen, other_model, reference)
    assert seen["answers"] == {"/pause_generation": 401, "/generate": 401, "/model_info": 401, "/health": 200}
    log = tmp_path / "far.log"
    assert TOKEN in log.read_text(), "SGLang no longer writes its options: let others read its log again"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
