from __future__ import annotations

import pytest

from agentrl.config.base import parse_config
from agentrl.sandbox.docker import DockerOptions, missing_on
from agentrl.types.errors import ConfigError
from agentrl.types.sandbox import Guarantee

WHOLE = {
    "MemoryLimit": True,
    "SwapLimit": True,
    "PidsLimit": True,
    "CpuCfsQuota": True,
    "SecurityOptions": ["name=seccomp,profile=default"],
}


@pytest.mark.parametrize(
    ("info", "guarantee"),
    [
        ({"MemoryLimit": False}, Guarantee.MEMORY),
        ({"SwapLimit": False}, Guarantee.MEMORY),
        ({"PidsLimit": False}, Guarantee.PROCESSES),
        ({"CpuCfsQuota": False}, Guarantee.CPU),
        ({"SecurityOptions": []}, Guarantee.FILES),
        ({"SecurityOptions": None}, Guarantee.FILES),
        ({"SecurityOptions": ["name=seccomp,profile=unconfined"]}, Guarantee.FILES),
    ],
)
def test_what_an_engine_lacks_is_not_promised_and_the_engine_is_named(info, guarantee):
    missing = missing_on("unix:///engine", WHOLE | info)
    assert set(missing) == {Guarantee.ALLOWLIST, Guarantee.GATEWAY, guarantee}
    assert "unix:///engine" in missing[guarantee]


def test_a_whole_engine_lacks_only_addresses():
    assert set(missing_on("unix:///engine", WHOLE)) == {Guarantee.ALLOWLIST, Guarantee.GATEWAY}


@pytest.mark.parametrize("user", ["0:0", "root", "1000"])
def test_commands_are_not_run_as_root(user):
    with pytest.raises(ConfigError, match="user"):
        parse_config(DockerOptions, {"user": user}, "recipe")
