"""Power is lost while consumed episodes move to the archive: each is there afterwards, once, and no other is gone."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from agentrl import codec
from agentrl.journal import archive as archiving
from agentrl.journal import disk, pruning
from agentrl.journal import entries as e
from agentrl.journal.archive import archive
from agentrl.journal.archive_file import archive_files, read_archived
from agentrl.journal.index import open_journal
from agentrl.journal.pruning import prune
from agentrl.testing.power_loss import Call, Content, DiskImage, Operation, write_content
from tests.unit.journal.journals import Journal, dropped, name_of, taken, whole_life

NUM_FINAL = 4
LOSSES_PER_MOMENT = 4
PROTECTIONS = ("draft", "archive's names", "archive's folder")


@dataclass
class Recorder:
    """Notes what archive and pruning tell the disk, in order, but for what is in `without`."""

    root: Path
    without: str = ""
    operations: list[Operation] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        make, rename, unlink = Path.mkdir, Path.rename, Path.unlink

        def noted_mkdir(path: Path, *args: object, **kwargs: object) -> None:
            if not path.exists():
                self._note(Call.MAKE_FOLDER, path)
            make(path, *args, **kwargs)  # type: ignore[arg-type]

        def noted_rename(path: Path, target: Path) -> Path:
            if self.without == "draft":
                self._written(path)
            self._note(Call.RENAME, path, str(target.relative_to(self.root)).encode())
            return rename(path, target)

        def noted_unlink(path: Path, missing_ok: bool = False) -> None:
            if path.exists() and path.suffix in (".journal", ".parquet"):
                self._note(Call.REMOVE, path)
            unlink(path, missing_ok)

        patch.setattr(Path, "mkdir", noted_mkdir)
        patch.setattr(Path, "rename", noted_rename)
        patch.setattr(Path, "unlink", noted_unlink)
        patch.setattr(archiving, "sync_path", self._sync_file)
        for module in (archiving, pruning):
            patch.setattr(module, "sync_folder", self._sync_folder)
        patch.setattr(disk.Disk, "sync_folder", lambda _disk, folder: self._sync_folder(folder))

    def _sync_file(self, path: Path) -> None:
        if self.without != "draft":
            self._written(path)
            self._note(Call.SYNC, path)

    def _written(self, path: Path) -> None:
        self._note(Call.CREATE, path)
        self._note(Call.WRITE, path, path.read_bytes())

    def _sync_folder(self, folder: Path) -> None:
        skipped = {"archive's names": self.root / "episodes", "archive's folder": self.root}.get(self.without)
        if folder != skipped:
            self._note(Call.SYNC_FOLDER, folder)

    def _note(self, call: Call, path: Path, data: bytes = b"") -> None:
        if path.is_relative_to(self.root):
            self.operations.append(Operation(call, path.relative_to(self.root), data))


def make_journal(root: Path) -> Content:
    """Episode n lies in the worker's segment n; all but the last two are final."""
    journal = Journal(root / "journal")
    for number in range(NUM_FINAL + 2):
        journal.rotate("worker")
        journal.play(number, whole_life(number))
    journal.note(taken(0, 0, 1), dropped(1, 2), taken(1, 3), e.Checkpointed(2), taken(2, 4))
    return content_of(root)


def content_of(root: Path) -> Content:
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def losses(before: Content, recorder: Recorder) -> Iterator[Content]:
    """What a loss of power at each moment leaves, by chance."""
    random, image = Random(0), DiskImage(before)
    for moment in range(len(recorder.operations) + 1):
        for _ in range(LOSSES_PER_MOMENT):
            yield image.after_loss(random)
        if moment < len(recorder.operations):
            image.apply(recorder.operations[moment])


def fault_of(root: Path, content: Content, expected: dict[str, bytes]) -> str | None:
    """What is wrong once the next checkpoint has archived and pruned what was left."""
    shutil.rmtree(root, ignore_errors=True)
    write_content(root, content, {})
    try:
        archive(root / "journal", root / "episodes")
        prune(root / "journal", root / "episodes")
        rows = [(file, name) for file in archive_files(root / "episodes") for name in names_in(file)]
        found = {name: codec.encode(read_archived(file, name)) for file, name in rows}
        in_play = set(open_journal(root / "journal").lives)
    except Exception as error:  # noqa: BLE001 - whatever it is, the run cannot go on from here
        return repr(error)
    if (twice := Counter(name for _, name in rows)) and max(twice.values()) > 1:
        return f"twice: {twice}"
    if found != expected:
        return f"archived {sorted(found)}"
    if not {name_of(NUM_FINAL), name_of(NUM_FINAL + 1)} <= in_play:
        return f"in play {sorted(in_play)}"
    return None


def names_in(file: Path) -> list[str]:
    import pyarrow.parquet as pq

    return pq.read_table(file, columns=["episode_id"]).column("episode_id").to_pylist()


def faults(tmp_path: Path, patch: pytest.MonkeyPatch, without: str) -> tuple[list[str], int]:
    """Faults of all states, and how many states there were."""
    root = tmp_path / "run"
    root.mkdir()
    before = make_journal(root)
    recorder = Recorder(root, without)
    with patch.context() as patched:
        recorder.install(patched)
        archive(root / "journal", root / "episodes")
        prune(root / "journal", root / "episodes")
    files = archive_files(root / "episodes")
    expected = {name: codec.encode(read_archived(file, name)) for file in files for name in names_in(file)}
    assert sorted(expected) == sorted(map(name_of, range(NUM_FINAL)))
    found, count = [], 0
    for content in losses(before, recorder):
        fault = fault_of(tmp_path / "state", content, expected)
        found += [fault] if fault else []
        count += 1
    return found, count


def test_no_loss_of_power_takes_an_episode_or_archives_one_twice(tmp_path: Path, monkeypatch) -> None:
    found, count = faults(tmp_path, monkeypatch, without="")
    assert found == []
    assert count > 50


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_without_a_sync_the_same_move_loses_episodes(protection: str, tmp_path: Path, monkeypatch) -> None:
    found, _ = faults(tmp_path, monkeypatch, without=protection)
    assert found
