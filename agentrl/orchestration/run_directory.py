"""A run's folder: plain files that a person can read, and the little state that a resume needs."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from agentrl import codec
from agentrl.buffer.frontier import FrontierState
from agentrl.config.base import parse_config
from agentrl.journal.claim import holder_of
from agentrl.journal.disk import DISK, sync_path
from agentrl.journal.durable_offsets import SegmentEnd
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.run_files import FileMarks, loss_of
from agentrl.telemetry.json_lines import read_json_lines, read_lines
from agentrl.types.episode import Episode
from agentrl.types.errors import ConfigError, StorageError
from agentrl.types.version import FIRST_VERSION, PolicyVersion
from agentrl.weights.digests import PROGRESS, digests_of

T = TypeVar("T")
_MARK_CHARACTERS = 60
_MARK = re.compile(rb"([A-Za-z0-9._-]+-[0-9a-f]{6})\n")


class RunStatus(StrEnum):
    """How a run stands."""

    RUNNING = "running"
    UNARCHIVED = "unarchived"
    """All that its loops do is done; some episodes of the ledger may not be in the archive yet."""
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RunState:
    """What changes about a run: how it stands, at which version of each policy, and why it ended if it failed.

    `files` are marks by which damage to the run's small files is found.
    """

    status: RunStatus
    versions: dict[str, PolicyVersion]
    message: str = ""
    files: FileMarks = field(default_factory=FileMarks)

    @property
    def version(self) -> PolicyVersion:
        """That of the policy that has come least far."""
        return min(self.versions.values(), key=lambda version: version.step)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a checkpoint says beside the trainer's files: the tasks that are done, and how far ledger and journal reach.

    Each policy is saved at steps of its own; `versions` are those of the newest checkpoint of each, this one's own
    included, and `number` counts the run's checkpoints. `journal` has the newest segment of each writer. `digests` are
    those of the checkpoint's files, by their paths in its folder; empty where an older program wrote it.
    """

    versions: dict[str, PolicyVersion]
    frontiers: dict[str, FrontierState] = field(default_factory=dict)
    ledger_bytes: int = 0
    journal: tuple[SegmentEnd, ...] = ()
    number: int = 0
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def steps(self) -> dict[str, int]:
        """The step of each policy's newest checkpoint."""
        return {policy: version.step for policy, version in self.versions.items()}


class RunDirectory:
    """Paths and small files of one run.

    Layout::

        config.json              the resolved configuration
        mark                     name by which engines know whose they are
        state.json               status and newest version of each policy
        metrics.jsonl            one line a step; the same in tensorboard/
        curve.png                the learning curve
        ledger.jsonl             one line for every episode whose end is final, up to the newest checkpoint
        journal/                 every turn as it was played; what `agentrl resume` goes on with
        episodes/                sample episodes, whole; `agentrl show` reads them. Consumed ones are in Parquet files
        weights/POLICY/VERSION/  staged weights of the newest versions
        checkpoints/POLICY/STEP/ what `agentrl resume` goes on from
        progress/POLICY/         copies of the checkpoints' progress.json
        logs/                    output of engines, trainer ranks, rollout and environment workers and the archiver
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def name_of(config: RunConfig) -> str:
        """Name of the folder of a configuration's first run."""
        return f"{config.name}-seed{config.seed}"

    @classmethod
    def create(cls, config: RunConfig) -> RunDirectory:
        """Make a new folder for a run, with a number behind its name if that is taken.

        Raises:
            StorageError: it cannot be written.
        """
        name = cls.name_of(config)
        path = config.runs_folder / name
        number = 2
        while path.exists():
            path = config.runs_folder / f"{name}-{number}"
            number += 1
        run = cls(path.absolute())
        try:
            # Whatever is synced below it later, a run without a name in its parents is lost with the power.
            DISK.make_folder(run.path)
            for folder in ("logs", "episodes", "weights", "checkpoints"):
                (run.path / folder).mkdir()
            run._write("config.json", config.model_dump_json(indent=2))
        except OSError as error:
            raise StorageError(f"run folder {path} cannot be written: {error}; choose another runs_folder") from error
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """An existing run's folder. Raises ConfigError if it is none."""
        if (path / "state.json").is_file() and not (path / "config.json").is_file():
            raise ConfigError(f"{path / 'config.json'} is missing; restore it from a copy")
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} is no run folder: config.json is missing; `agentrl runs` lists the runs")
        return cls(path.absolute())

    @property
    def logs(self) -> Path:
        """Folder of the processes' output."""
        return self.path / "logs"

    @property
    def journal(self) -> Path:
        """Folder of the journal's segments."""
        return self.path / "journal"

    @property
    def ledger(self) -> Path:
        """File with one line for every episode whose end is final."""
        return self.path / "ledger.jsonl"

    @property
    def episodes(self) -> Path:
        """Folder of sample episodes, and of the archive."""
        return self.path / "episodes"

    def cut_ledger(self, num_bytes: int, is_salvaged: bool = False) -> set[str]:
        """Take back what the ledger says behind a checkpoint; returns the names of the episodes that stay on it.

        With `is_salvaged` a ledger that is shorter keeps its whole lines.

        Raises:
            StorageError: it is shorter than the checkpoint knows it.
        """
        found_bytes = self.ledger.stat().st_size if self.ledger.is_file() else 0
        kept_bytes = num_bytes
        if found_bytes < num_bytes and not is_salvaged:
            raise StorageError(
                f"{self.ledger} lacks {num_bytes - found_bytes} of the {num_bytes} bytes that the newest checkpoint "
                "knows: the ends of episodes are lost; restore the file from a copy, or go on without them: "
                "`agentrl resume RUN --salvage`"
            )
        if not self.ledger.is_file():
            return set()
        if found_bytes < num_bytes:
            kept_bytes = self.ledger.read_bytes().rfind(b"\n") + 1
        with self.ledger.open("rb+") as file:
            file.truncate(kept_bytes)
        return {row["episode_id"] for row in read_json_lines(self.ledger)}

    def mark(self) -> str:
        """The name that no other run bears: the folder's, and six random digits.

        Raises:
            StorageError: it cannot be written, or is damaged.
        """
        path = self.path / "mark"
        if not self.has_begun:
            name = re.sub(r"[^A-Za-z0-9._-]", "-", self.path.name)[:_MARK_CHARACTERS]
            self._write("mark", f"{name}-{secrets.token_hex(3)}")
        found = _MARK.fullmatch(path.read_bytes())
        if found is None:
            raise StorageError(f"{path} is damaged; restore it from a copy, or remove it: the run gets another name")
        return found[1].decode()

    @property
    def has_begun(self) -> bool:
        """Whether it has its mark: something was started."""
        return (self.path / "mark").is_file()

    @property
    def metrics(self) -> Path:
        """File with one line of metrics a step."""
        return self.path / "metrics.jsonl"

    @property
    def curve(self) -> Path:
        """Picture of the learning curve."""
        return self.path / "curve.png"

    def weights(self, policy: str, version: PolicyVersion) -> Path:
        """Folder of staged weights."""
        return self.path / "weights" / policy / str(version)

    def checkpoint(self, policy: str, step: int) -> Path:
        """Folder of a policy's checkpoint."""
        return self.path / "checkpoints" / policy / f"{step:06d}"

    def config(self) -> RunConfig:
        """The configuration that the run was started with. Raises ConfigError."""
        path = self.path / "config.json"
        try:
            values = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}; restore it from a copy") from None
        try:
            return parse_config(RunConfig, values, str(path))
        except ConfigError as error:
            raise ConfigError(f"{error}; unless you edited the file, restore it from a copy") from None

    def state(self) -> RunState | None:
        """How the run stands; None if it never started. Raises StorageError."""
        remedy = "restore it from a copy, or remove it: a resume goes on from the newest checkpoint and the journal"
        return self._read(self.path / "state.json", RunState, remedy)

    def status_now(self) -> str:
        """How the run stands, as far as can be seen from outside: it may have been killed in the midst of its work."""
        state = self.state()
        if state is None:
            return "never started"
        if state.status is not RunStatus.RUNNING:
            return str(state.status)
        holder = holder_of(self.journal)
        if holder is None or holder.is_alive:
            return str(state.status)
        return "killed" if holder.is_alive is False else f"running on {holder.host}"

    def write_state(self, state: RunState) -> None:
        """Replace the state. Raises StorageError."""
        self._write("state.json", codec.seal(codec.to_json(state)).decode())

    def write_progress(self, folder: Path, progress: Progress) -> None:
        """Complete a checkpoint: without this file it does not count. Digests are added unless it has them.

        Blocks until all of it outlives a loss of power.

        Raises:
            StorageError: it cannot be written.
        """
        try:
            if not progress.digests:
                progress = replace(progress, digests=digests_of(folder))
            for path in [*folder.rglob("*"), folder]:
                sync_path(path)
            sync_path(folder.parent)
            sync_path(folder.parent.parent)
        except OSError as error:
            raise StorageError(f"{folder} cannot be synced: {error}; free space, then resume the run") from error
        for path in (folder / PROGRESS, progress_copy(folder)):
            self._write(str(path.relative_to(self.path)), codec.seal(codec.to_json(progress)).decode())

    def checkpoint_folders(self) -> list[Path]:
        """Of all checkpoints that are complete, or of which only the copy of what completed them is left."""
        own = {path.parent for path in (self.path / "checkpoints").glob(f"*/[0-9]*/{PROGRESS}")}
        copies = {self.path / "checkpoints" / p.parent.name / p.stem for p in self.path.glob("progress/*/[0-9]*.json")}
        return sorted(own | copies)

    def progress(self, path: Path) -> Progress | None:
        """What a ``progress.json``, or its copy, says; None if there is none. Raises StorageError."""
        remedy = "restore it from a copy, or move it away and go on from what is left: `agentrl resume RUN --salvage`"
        return self._read(path, Progress, remedy)

    def latest_checkpoint(self) -> Progress | None:
        """What the newest complete checkpoint says."""
        return next((progress for _, progress in self.checkpoints()), None)

    def checkpoints(self) -> Iterator[tuple[Path, Progress]]:
        """All complete checkpoints of all policies, the newest first. Raises StorageError."""
        found = []
        for path in (self.path / "checkpoints").glob(f"*/[0-9]*/{PROGRESS}"):
            progress = self.progress(path)
            if progress is not None:
                found.append((path.parent, progress))
        yield from sorted(found, key=lambda entry: entry[1].number, reverse=True)

    def saved(self, policy: str, version: PolicyVersion) -> Path | None:
        """Folder of a policy's checkpoint of a version; None if there is no complete one."""
        folder = self.checkpoint(policy, version.step)
        return folder if (folder / PROGRESS).is_file() else None

    def prune_checkpoints(self, policy: str, keep: int, begun_from: Path | None = None) -> None:
        """Delete complete checkpoints but the newest and the one `begun_from`, which engines load at a late start."""
        for folder in self._saved_folders(policy)[:-keep]:
            if folder != begun_from:
                progress_copy(folder).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)

    def _saved_folders(self, policy: str) -> list[Path]:
        """Of a policy's complete checkpoints, the oldest first."""
        return sorted(path.parent for path in (self.path / "checkpoints" / policy).glob(f"[0-9]*/{PROGRESS}"))

    def prune_weights(self, policy: str, keep: int, pinned: set[str]) -> None:
        """Delete staged weights but the newest and those still needed."""
        folders = sorted(
            (path for path in (self.path / "weights" / policy).iterdir() if not path.name.endswith(".staging")),
            key=lambda path: PolicyVersion.parse(path.name),
        )
        for folder in folders[:-keep]:
            if str(folder) not in pinned:
                shutil.rmtree(folder, ignore_errors=True)

    def newest_model(self, policy: str) -> Path:
        """Folder of the newest weights that are left of a policy; the first weights if there are no others."""
        config = self.config().policies[policy]
        folders = self._saved_folders(policy)
        staged = [p for p in (self.path / "weights" / policy).glob("*.*") if not p.name.endswith(".staging")]
        if staged and config.trainer.lora is None:  # with LoRA an adapter is staged, a checkpoint holds it merged
            return max(staged, key=lambda path: PolicyVersion.parse(path.name))
        return folders[-1] if folders else config.model

    def version_of(self, model: Path) -> PolicyVersion:
        """The version whose weights lie in a folder that `newest_model` gave."""
        if model.parent.parent == self.path / "weights":
            return PolicyVersion.parse(model.name)
        if model.parent.parent == self.path / "checkpoints":
            progress = self.progress(model / PROGRESS)
            assert progress is not None
            return progress.versions[model.parent.name]
        return FIRST_VERSION

    def check_length(self, name: str) -> None:
        """Whether a file has all that it had when the state was written. Raises StorageError."""
        state = self.state()
        if state is not None and (loss := loss_of(self.path, state.files, name)) is not None:
            raise StorageError(f"{loss}; restore it from a copy")

    def last_metric(self, name: str) -> float | None:
        """The newest value of a metric; None if there is none. Raises StorageError."""
        self.check_length(self.metrics.name)
        if not self.metrics.is_file():
            return None
        values = [row[name] for row in read_json_lines(self.metrics) if name in row]
        return values[-1] if values else None

    def _write(self, name: str, text: str) -> None:
        """Replace a small file as a whole, so that a crash leaves the old or the new one."""
        path = self.path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(path.suffix + ".new")
            temporary.write_text(text + "\n")
            sync_path(temporary)
            temporary.replace(path)
            sync_path(path.parent)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error}; free space, then resume the run") from error

    def _read(self, path: Path, kind: type[T], remedy: str) -> T | None:
        if not path.is_file():
            return None
        try:
            return codec.from_json(codec.unseal(path.read_bytes()), kind)
        except (OSError, ValueError) as error:
            raise StorageError(f"{path} is damaged: {error}; {remedy}") from error


def progress_copy(folder: Path) -> Path:
    """Where a copy of a checkpoint's ``progress.json`` lies, without which nobody knew what to make it again from.

    A folder that is to take a checkpoint's place (``remade-000004``) has the same.
    """
    return folder.parents[2] / "progress" / folder.parent.name / f"{folder.name.rpartition('-')[2]}.json"


def read_episodes(file: Path) -> list[Episode]:
    """Episodes of a file of the run folder; a line that a crash cut off is left out. Raises StorageError."""
    try:
        return [codec.from_json(line, Episode) for line in read_lines(file)]
    except ValueError as error:
        raise StorageError(f"{file} holds a line that is no episode: {error}; restore it from a copy") from error
