"""The real SGLang on a CPU as a process, from the environment that ``make sglang-cpu`` makes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.inference.config import SGLangEngineConfig
from agentrl.orchestration.commands import EngineLaunch, engine_command
from agentrl.process.ports import free_port
from agentrl.types.version import PolicyVersion
from tests.servers.process import running_server

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
RECIPE = ROOT / "deploy" / "sglang-cpu"
START_S = 360.0
LORA_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": {"enable-return-routed-experts": True},
    "lora": {
        "enable-lora": True, "max-lora-rank": 8, "max-loras-per-batch": 3, "lora-backend": "torch_native",
        "lora-target-modules": LORA_MODULES,
    },
    "sharded": {"tp-size": 2},
    "tied": {},
    "reward": {"json-model-override-args": '{"architectures": ["Qwen3ForSequenceClassification"]}'},
    "in-place": {"disable-overlap-schedule": True, "chunked-prefill-size": 64},
}  # fmt: skip


def sglang_config(kind: str = "dense", max_running_requests: int = 6) -> SGLangEngineConfig:
    """How the run starts SGLang on a CPU, of one of the kinds in `OPTIONS`.

    Raises AssertionError if it is not installed.
    """
    assert PYTHON.exists(), f"no SGLang at {PYTHON}; run `make sglang-cpu`"
    args = {
        "device": "cpu", "attention-backend": "torch_native", "dtype": "float32", "mem-fraction-static": 0.1,
        "max-total-tokens": 32768, "max-running-requests": max_running_requests, "sleep-on-idle": True,
        "load-snapshot-publish-interval": 1,
        **OPTIONS[kind],
    }  # fmt: skip
    environment = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(RECIPE),
    }
    if kind == "sharded":
        cores = sorted(os.sched_getaffinity(0))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    command = [str(PYTHON), str(RECIPE / "launch.py")]
    return SGLangEngineConfig(kind="sglang", command=command, args=args, env=environment, start_s=START_S)


@contextmanager
def running_sglang(kind: str, model: Path, log: Path, version: str, max_running_requests: int = 6) -> Iterator[str]:
    """An SGLang server of one of the kinds in `OPTIONS`; gives its base URL.

    Raises AssertionError if it is not installed or does not start.
    """
    config = sglang_config(kind, max_running_requests)
    launch = EngineLaunch("main", kind, model, PolicyVersion.parse(version), config, False, log.parent)
    port = free_port()
    command, environment = engine_command(launch, port)
    with running_server(command, port, log, START_S, environment) as url:
        yield url
