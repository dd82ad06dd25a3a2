from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.journal.entries import StepResultRecorded, unpack
from agentrl.journal.frames import Frame
from agentrl.journal.segments import read_segment, segment_paths
from agentrl.journal.writer import JournalWriter
from agentrl.rollouts.durable import WorkerLog
from agentrl.testing.builders import build_ticket
from agentrl.testing.sole_holder import SoleHolder
from agentrl.types.environment import Opening, StepResult
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.message import Message, Role

LIMIT_BYTES = 2000


@pytest.fixture
async def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerLog:
    monkeypatch.setattr("agentrl.journal.writer.MAX_PAYLOAD_BYTES", LIMIT_BYTES)
    return await SoleHolder(JournalWriter(tmp_path, "worker-0"), 1).open(build_ticket(), ())


def _long(role: Role) -> tuple[Message, ...]:
    return (Message(role, "x" * LIMIT_BYTES),)


async def test_a_snapshot_that_no_entry_holds_is_the_environments_failure_and_harms_no_other_entry(
    log: WorkerLog, tmp_path: Path
) -> None:
    with pytest.raises(EpisodeError, match=r"step 0 cannot be put on record: .* above the journal's 2000") as caught:
        await log.resulted((), StepResult(), 0.1, bytes(LIMIT_BYTES))
    assert caught.value.failure.boundary is Boundary.ENVIRONMENT
    await log.resulted((), StepResult(), 0.1, b"small")
    await log._journal.writer.close()
    frames = [f for path in segment_paths(tmp_path, "worker-0") for f in read_segment(path) if isinstance(f, Frame)]
    entries = [unpack(frame.schema, frame.kind, frame.payload) for frame in frames]
    assert [entry.snapshot for entry in entries if isinstance(entry, StepResultRecorded)] == [b"small"]


async def test_so_are_an_opening_and_a_result(log: WorkerLog) -> None:
    with pytest.raises(EpisodeError, match="the opening cannot be put on record") as caught:
        await log.opened(Opening(_long(Role.USER)), None)
    assert caught.value.failure.kind == "not_recordable"
    with pytest.raises(EpisodeError, match="cannot be put on record"):
        await log.resulted((), StepResult(_long(Role.TOOL)), 0.1, None)
    await log._journal.writer.close()
