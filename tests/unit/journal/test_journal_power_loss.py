from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from agentrl.testing.power_loss import Call, DiskImage, Operation, RecordingDisk
from tests.storms.journal_protections import PROTECTIONS, measure_without
from tests.storms.outages import OutagePlan, play_outages

FILE = Path("folder", "file")
DURABLE = (
    Operation(Call.MAKE_FOLDER, Path("folder")),
    Operation(Call.SYNC_FOLDER, Path()),
    Operation(Call.CREATE, FILE),
    Operation(Call.WRITE, FILE, b"0123"),
    Operation(Call.SYNC, FILE),
    Operation(Call.SYNC_FOLDER, Path("folder")),
)


def _states(*operations: Operation, count: int = 300) -> set[bytes | None]:
    """What may be left of the file; None where it has gone."""
    image = DiskImage({})
    for operation in operations:
        image.apply(operation)
    return {image.after_loss(Random(seed)).get(FILE) for seed in range(count)}


def test_what_was_synced_outlives_every_loss() -> None:
    assert _states(*DURABLE) == {b"0123"}


@pytest.mark.parametrize("left_out", [Operation(Call.SYNC_FOLDER, Path()), DURABLE[-1]])
def test_a_file_may_go_with_a_name_whose_folder_was_not_synced(left_out: Operation) -> None:
    assert _states(*(o for o in DURABLE if o != left_out)) == {b"0123", None}


def test_writes_that_were_not_synced_may_be_whole_torn_missing_or_out_of_order() -> None:
    writes = (Operation(Call.WRITE, FILE, b"ab"), Operation(Call.WRITE, FILE, b"cd"))
    states = _states(*DURABLE, *writes)
    assert states >= {b"0123", b"0123ab", b"0123abcd", b"0123abc", b"0123\0\0cd", b"0123\0\0", b"0123\0b"}
    assert all(state is not None and state.startswith(b"0123") for state in states)


def test_bytes_of_another_file_may_stand_where_data_is_missing() -> None:
    other = Path("folder", "other")
    old = (Operation(Call.CREATE, other), Operation(Call.WRITE, other, b"ABCDEFGH"), Operation(Call.SYNC, other))
    assert b"0123EFcd" in _states(*old, *DURABLE, *(Operation(Call.WRITE, FILE, data) for data in (b"ab", b"cd")))


def test_a_removed_name_may_come_back_until_its_folder_is_synced() -> None:
    removed = Operation(Call.REMOVE, FILE)
    assert _states(*DURABLE, removed) == {b"0123", None}
    assert _states(*DURABLE, removed, DURABLE[-1]) == {None}


def test_a_disk_notes_what_it_is_told_in_order(tmp_path: Path) -> None:
    disk = RecordingDisk(tmp_path)
    disk.make_folder(tmp_path / "folder")
    descriptor = disk.create(tmp_path / FILE)
    disk.write(descriptor, memoryview(b"0123"))
    disk.sync(descriptor)
    disk.sync_folder(tmp_path / "folder")
    disk.close(descriptor)
    assert tuple(disk.operations) == DURABLE


@pytest.mark.parametrize("seed", range(3))
async def test_no_loss_of_power_takes_what_was_acknowledged(seed: int, tmp_path: Path) -> None:
    verdict = await play_outages(OutagePlan(num_starts=3, losses_per_moment=3, seed=seed), tmp_path)
    assert verdict.states > 300
    assert verdict.faults == {}
    assert verdict.starts == 3


@pytest.mark.parametrize("protection", PROTECTIONS)
async def test_without_a_protection_the_same_runs_find_a_fault(protection: str, tmp_path: Path) -> None:
    plan = OutagePlan(num_starts=4, losses_per_moment=2, seed=1)
    verdict = await measure_without(protection, tmp_path, plan)
    assert verdict.faults.total() > 0
