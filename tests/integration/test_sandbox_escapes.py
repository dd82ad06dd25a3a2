from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.types.errors import EpisodeError
from agentrl.types.sandbox import Guarantee
from tests.integration.sandbox_hosts import AS_NOBODY, keeper
from tests.storms.escape_attempts import ATTEMPTS, HARMLESS, SPEC
from tests.storms.escape_targets import Outside, outside
from tests.storms.escapes import attempt_all

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def targets() -> Iterator[Outside]:
    # Not below the folders of tests, which nobody but their user may enter: the sandbox is to keep attempts out.
    with tempfile.TemporaryDirectory(prefix="outside-", dir="/var/tmp") as folder, outside(Path(folder)) as made:
        yield made


async def test_bwrap_contains_every_attempt(targets: Outside) -> None:
    async with keeper() as host:
        assert Guarantee.MEMORY in await host.guarantees()
        found = await attempt_all(host, targets)
    assert len(found) == len(ATTEMPTS) + 1
    assert {name: faults for name, faults in found.items() if faults} == {}


async def test_bwrap_without_root_contains_all_but_what_it_says_it_does_not(targets: Outside) -> None:
    limits = replace(SPEC, memory_bytes=None, cpus=None)
    async with keeper(module=AS_NOBODY) as host:
        assert frozenset(Guarantee) - await host.guarantees() == {Guarantee.MEMORY, Guarantee.CPU}
        for asked in ({"memory_bytes": 1 << 26}, {"cpus": 1.0}):
            with pytest.raises(EpisodeError, match="control group"):
                await host.open(replace(limits, **asked))
        found = await attempt_all(host, targets, limits)
    assert {name: faults for name, faults in found.items() if faults} == {}


async def test_local_isolates_nothing_and_so_takes_no_task_that_asks_for_it(targets: Outside) -> None:
    async with keeper("local") as host:
        with pytest.raises(EpisodeError, match="isolates nothing"):
            await host.open(SPEC)
        trusting = replace(SPEC, memory_bytes=None, processes=None, disk_bytes=None, cpus=None, needs=frozenset())
        sandbox = await host.open(trusting)
        # Those alone that do no harm to this machine.
        harmless = {attempt.name: attempt for attempt in ATTEMPTS if attempt.name in HARMLESS}
        found = {}
        for name, attempt in harmless.items():
            faults, brought = await attempt.act(sandbox, targets)
            found[name] = faults + targets.faults(brought)
    assert len(found) == len(HARMLESS)
    assert [name for name, faults in found.items() if not faults] == [], "these would find nothing anywhere"
