from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from agentrl.inference.config import EmbeddedEngineConfig, SGLangEngineConfig
from agentrl.orchestration.commands import EngineLaunch, engine_command
from agentrl.types.errors import ConfigError
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import PauseMode

MODEL = Path("/models/m")


def _launch(config: EmbeddedEngineConfig | SGLangEngineConfig, number: int = 0, exact: bool = False) -> EngineLaunch:
    return EngineLaunch("main", f"engine-main-{number}", MODEL, PolicyVersion(0, 3), config, exact, Path("/l"), number)


def test_an_embedded_engine_gets_its_options_and_cores() -> None:
    config = EmbeddedEngineConfig(threads=2, args={"prefill_tokens": 512})
    command, environment = engine_command(_launch(config, exact=True), 30000)
    assert command[:5] == [sys.executable, "-m", "agentrl.process.child", "agentrl.cli.main", "engine"]
    words = " ".join(command[5:])
    assert words == (
        "/models/m --port 30000 --weight-version 0.3 --supervised --threads 2 --deterministic --prefill-tokens 512"
    )
    assert environment == {"OMP_NUM_THREADS": "2"}


def test_sglangs_own_options_are_passed_through_as_it_writes_them() -> None:
    args = {"tp-size": 2, "enable_lora": True, "disable-radix-cache": False, "lora-target-modules": ["q", "k"]}
    config = SGLangEngineConfig(kind="sglang", command=["py", "-m", "serve"], args=args, env={"A": "1"})
    command, environment = engine_command(_launch(config), 30000)
    assert command[:3] == [sys.executable, "-m", "agentrl.process.supervised"]
    assert " ".join(command[3:]) == (
        "py -m serve --model-path /models/m --host 127.0.0.1 --port 30000 --weight-version 0.3 "
        "--tp-size 2 --enable-lora --lora-target-modules q k"
    )
    assert environment == {"A": "1"}


def test_an_engine_bears_its_runs_mark_from_the_start() -> None:
    for config in (EmbeddedEngineConfig(), SGLangEngineConfig(kind="sglang")):
        command, _ = engine_command(dataclasses.replace(_launch(config), mark="sql-seed0-3fa9c1"), 30000)
        assert command[command.index("--weight-version") + 1] == "0.3@sql-seed0-3fa9c1"


@pytest.mark.parametrize(
    ("args", "times"), [({}, 1), ({"disable_overlap_schedule": True}, 1), ({"disable-overlap-schedule": False}, 0)]
)
def test_an_sglang_server_that_swaps_in_place_does_not_schedule_ahead(args: dict, times: int) -> None:
    launch = dataclasses.replace(_launch(SGLangEngineConfig(kind="sglang", args=args)), pause_mode=PauseMode.IN_PLACE)
    assert engine_command(launch, 30000)[0].count("--disable-overlap-schedule") == times


def test_each_server_sees_its_own_devices_and_a_missing_entry_is_named() -> None:
    config = SGLangEngineConfig(kind="sglang", devices=["0,1", "2,3"])
    assert engine_command(_launch(config, 1), 30000)[1] == {"CUDA_VISIBLE_DEVICES": "2,3"}
    message = "policies.main.engine.devices has 2 entries, and engine engine-main-2 needs entry 3"
    with pytest.raises(ConfigError, match=message):
        engine_command(_launch(config, 2), 30000)
