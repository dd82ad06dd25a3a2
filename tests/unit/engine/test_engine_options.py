from __future__ import annotations

import pytest

from agentrl.config.base import parse_config
from agentrl.engine.options import EngineOptions
from agentrl.types.errors import ConfigError


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::"])
def test_an_address_that_others_reach_needs_a_token(host: str) -> None:
    values = {"model": "model", "port": 1, "host": host}
    with pytest.raises(ConfigError, match="give --token"):
        parse_config(EngineOptions, values, "agentrl engine")
    assert parse_config(EngineOptions, values | {"token": "secret"}, "agentrl engine").host == host


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.0.1", "::1"])
def test_loopback_needs_none(host: str) -> None:
    values = {"model": "model", "port": 1, "host": host}
    assert parse_config(EngineOptions, values, "agentrl engine").token is None
