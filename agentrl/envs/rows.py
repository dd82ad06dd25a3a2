"""Where the tasks of an environment come from: a list of rows, a file of them, or a function that makes one."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from agentrl.types.errors import ConfigError
from agentrl.types.task import Split, Task

Row = dict[str, Any]


class TaskSource(ABC):
    """Gives the tasks of an environment; the same arguments give the same task."""

    @property
    @abstractmethod
    def num_tasks(self) -> int | None:
        """Number of training tasks, None where they are endless."""

    @abstractmethod
    def row(self, split: Split, ordinal: int, seed: int) -> Row:
        """What a task is made of: plain JSON."""

    def task(self, environment: str, split: Split, ordinal: int, seed: int) -> Task:
        """The task of that ordinal, counted from 0."""
        return Task(environment, split, ordinal, self.row(split, ordinal, seed))


class Rows(TaskSource):
    """Tasks from a list of rows, or from a file with a JSON object a line, read when the first task is asked for.

    `heldout` is the share of rows that is never trained, or the held-out rows themselves. Which rows a share takes is
    decided by their content alone: equal rows are on one side, and a row that is added moves few others. More held-out
    tasks than rows are asked for are the same rows again. Every row must have `fields`.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]] | Path,
        *,
        heldout: float | Sequence[Mapping[str, Any]] | Path = 0.1,
        fields: Sequence[str] = (),
    ) -> None:
        self._rows, self._heldout, self._fields = rows, heldout, tuple(fields)

    @property
    def num_tasks(self) -> int:
        """Rows that are trained. Raises ConfigError as `row` does."""
        return len(self._split[Split.TRAIN])

    def row(self, split: Split, ordinal: int, seed: int) -> Row:
        """The row of that ordinal. Raises ConfigError if rows cannot be read, lack a field or are too few."""
        rows = self._split[split]
        return dict(rows[ordinal % len(rows)])

    @cached_property
    def _split(self) -> dict[Split, list[Row]]:
        rows = self._read(self._rows)
        if isinstance(self._heldout, float | int):
            return _divide(rows, float(self._heldout))
        halves = {Split.TRAIN: rows, Split.HELDOUT: self._read(self._heldout)}
        if empty := [split for split, half in halves.items() if not half]:
            raise ConfigError(f"there are no {empty[0]} tasks; give at least one row")
        return halves

    def _read(self, rows: Sequence[Mapping[str, Any]] | Path) -> list[Row]:
        if isinstance(rows, Path):
            return [self._checked(row, f"{rows}, line {line}") for line, row in _lines(rows)]
        return [self._checked(row, f"row {place}") for place, row in enumerate(rows, 1)]

    def _checked(self, row: object, where: str) -> Row:
        if not isinstance(row, Mapping):
            raise ConfigError(f"{where}: a task is an object with fields, not {type(row).__name__}")
        missing = [name for name in self._fields if name not in row]
        if missing:
            raise ConfigError(f"{where}: the row lacks '{missing[0]}'; it has {', '.join(map(str, row)) or 'nothing'}")
        return dict(row)


class Generated(TaskSource):
    """Endless tasks from a function of a seeded generator. Held-out ones are the same whatever the run's seed.

    Both splits draw from one distribution: whoever wants none of the held-out tasks trained makes the space large.

    Example: ``Generated(lambda chance: {"a": chance.randrange(100), "b": chance.randrange(100)})``.
    """

    def __init__(self, make: Callable[[random.Random], Mapping[str, Any]]) -> None:
        self._make = make

    @property
    def num_tasks(self) -> None:
        """Endless."""
        return None

    def row(self, split: Split, ordinal: int, seed: int) -> Row:
        """What the function makes of a generator of split, seed and ordinal."""
        own_seed = seed if split is Split.TRAIN else 0
        return dict(self._make(random.Random(f"{split}-{own_seed}-{ordinal}")))


def _lines(file: Path) -> list[tuple[int, object]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tasks cannot be read from {file}: {error}; give a file with a JSON object a line") from None
    found: list[tuple[int, object]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append((number, json.loads(line)))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{file}, line {number}: not JSON ({error}); give a JSON object a line") from None
    return found


def _divide(rows: list[Row], share: float) -> dict[Split, list[Row]]:
    """Rows by split: those with the smallest digests are held out, at least one of different rows on each side."""
    digests = [xxhash.xxh3_64_intdigest(json.dumps(row, sort_keys=True).encode()) for row in rows]
    different = sorted(set(digests))
    if not 0 < share < 1:
        raise ConfigError(f"heldout is {share:g}; give a share between 0 and 1, or the held-out rows themselves")
    if len(different) < 2:
        raise ConfigError(f"{len(different)} different rows cannot be split; give two or more, or heldout rows")
    held = set(different[: min(max(round(share * len(different)), 1), len(different) - 1)])
    halves: dict[Split, list[Row]] = {Split.TRAIN: [], Split.HELDOUT: []}
    for row, digest in zip(rows, digests, strict=True):
        halves[Split.HELDOUT if digest in held else Split.TRAIN].append(row)
    return halves
