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
        "/models/m --host 127.0.0.1 --port 30000 --weight-version 0.3 --supervised --threads 2 --deterministic "
        "--prefill-tokens 512"
    )
    assert environment == {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "GOMP_SPINCOUNT": "1000"}


def test_how_long_threads_spin_is_for_the_user_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    _, environment = engine_command(_launch(EmbeddedEngineConfig()), 30000)
    assert environment["GOMP_SPINCOUNT"] == "7"


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


@pytest.mark.parametrize("config", [EmbeddedEngineConfig(), SGLangEngineConfig(kind="sglang")])
def test_an_engine_that_other_hosts_reach_gets_its_token_where_no_list_of_processes_shows_it(
    config: EmbeddedEngineConfig | SGLangEngineConfig,
) -> None:
    launch = dataclasses.replace(_launch(config), token="c0ffee")
    command, environment = engine_command(launch, 30000, "10.0.0.5")
    assert command[command.index("--host") + 1] == "10.0.0.5"
    assert "c0ffee" not in " ".join(command) + repr(launch)
    variable = command[command.index("--token-variable") + 1] if config.kind == "embedded" else command[3]
    assert environment[variable] == "c0ffee"


@pytest.mark.parametrize("config", [EmbeddedEngineConfig(), SGLangEngineConfig(kind="sglang")])
def test_no_engine_listens_for_other_hosts_without_a_token(config: EmbeddedEngineConfig | SGLangEngineConfig) -> None:
    with pytest.raises(ConfigError, match=r"engine-main-0 would listen at 10\.0\.0\.5 without a token"):
        engine_command(_launch(config), 30000, "10.0.0.5")


def test_on_loopback_no_token_is_handed_over() -> None:
    launch = dataclasses.replace(_launch(EmbeddedEngineConfig()), token="c0ffee")
    command, environment = engine_command(launch, 30000)
    assert "--token-variable" not in command
    assert "c0ffee" not in environment.values()


def test_sglangs_own_configuration_file_leaves_no_room_for_a_token() -> None:
    config = SGLangEngineConfig(kind="sglang", args={"config": "/etc/server.yaml"})
    launch = dataclasses.replace(_launch(config), token="c0ffee")
    with pytest.raises(ConfigError, match=r"policies\.main\.engine\.args\.config: .*put its options into engine.args"):
        engine_command(launch, 30000, "10.0.0.5")
    assert "/etc/server.yaml" in engine_command(launch, 30000)[0]


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
