from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config.base import parse_config
from agentrl.engine.main import run_engine
from agentrl.engine.options import EngineOptions
from agentrl.types.errors import ConfigError

BEYOND = f"cuda:{torch.cuda.device_count()}"


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::"])
def test_an_address_that_others_reach_needs_a_token(host: str) -> None:
    values = {"model": "model", "port": 1, "host": host}
    with pytest.raises(ConfigError, match="give --token"):
        parse_config(EngineOptions, values, "agentrl engine")
    assert parse_config(EngineOptions, values | {"token": "secret"}, "agentrl engine").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_empty_token_is_none(host: str) -> None:
    values = {"model": "model", "port": 1, "host": host, "token": ""}
    with pytest.raises(ConfigError, match="agentrl engine: token: "):
        parse_config(EngineOptions, values, "agentrl engine")


@pytest.mark.parametrize(
    "wrong", [{"host": "engine.example"}, {"host": "[::"}, {"threads": "many"}, {"port": None}, {}]
)
def test_no_error_about_other_options_shows_the_token(wrong: dict[str, Any]) -> None:
    values = {"model": "model", "token": "c0ffee"} | wrong
    with pytest.raises(ConfigError) as caught:
        parse_config(EngineOptions, values, "agentrl engine")
    assert "c0ffee" not in str(caught.value)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.0.1", "::1"])
def test_loopback_needs_none(host: str) -> None:
    values = {"model": "model", "port": 1, "host": host}
    assert parse_config(EngineOptions, values, "agentrl engine").token is None


@pytest.mark.parametrize(
    ("device", "words"),
    [(BEYOND, f"--device {BEYOND}: torch .* finds {torch.cuda.device_count()} CUDA devices"), ("gpu", "is no device")],
)
def test_a_device_that_the_machine_lacks_is_named_before_anything_is_loaded(device: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_engine(EngineOptions(model=Path("/no/such/model"), port=0, device=device), supervised=True)
