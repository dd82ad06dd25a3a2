from __future__ import annotations

import tempfile
from pathlib import Path

import docker
import pytest

from tests.docker.playing import IMAGE
from tests.integration.sandbox_hosts import keeper
from tests.storms.escape_attempts import ATTEMPTS
from tests.storms.escape_targets import outside
from tests.storms.escapes import attempt_all


@pytest.mark.timeout(900)
async def test_docker_contains_every_attempt_and_leaves_nothing(url: str, engine: docker.APIClient) -> None:
    with tempfile.TemporaryDirectory(prefix="outside-", dir="/var/tmp") as folder, outside(Path(folder)) as targets:
        async with keeper("docker", options={"hosts": [url], "image": IMAGE}) as host:
            found = await attempt_all(host, targets)
            mine = engine.containers(all=True, filters={"label": "agentrl.sandbox=test"})
    assert len(found) == len(ATTEMPTS) + 1
    assert {name: faults for name, faults in found.items() if faults} == {}
    assert len(mine) <= 4, "more containers are left than are kept warm"
    assert engine.containers(all=True, filters={"label": "agentrl.sandbox=test"}) == []
