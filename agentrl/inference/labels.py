"""Labels of an engine's weights: a policy version, and behind it the mark of the run that it belongs to.

Servers keep the label as it is and give it with every answer. So a run that takes an engine is seen by every other
one, and none trains on what another one's weights wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.types.errors import EngineError, EngineRestartedError, EngineTakenError
from agentrl.types.version import PolicyVersion

_SEPARATOR = "@"


def mark_of(label: object) -> str | None:
    """The mark in a label; None if it bears none. Example: ``0.17@sql-seed0-3fa9c1`` gives ``sql-seed0-3fa9c1``."""
    _, separator, mark = str(label).partition(_SEPARATOR)
    return mark if separator else None


def unmarked(label: object) -> str:
    """A label without its mark."""
    return str(label).partition(_SEPARATOR)[0]


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of one engine as one run writes and reads them; without a mark they are bare versions.

    Example: with the mark ``coin-seed0-77ab01`` version 0.3 is written ``0.3@coin-seed0-77ab01``, and that text, and
    no other one, is read as 0.3.
    """

    engine: str
    url: str
    mark: str | None = None

    def write(self, version: PolicyVersion | str) -> str:
        """The label of a version."""
        return str(version) if self.mark is None else f"{version}{_SEPARATOR}{self.mark}"

    def read(self, label: str) -> PolicyVersion:
        """The version in a label.

        Raises:
            EngineTakenError: it bears another run's mark.
            EngineRestartedError: it bears none, where this run had put its own.
            ValueError: it holds no version.
        """
        mark = mark_of(label)
        if mark == self.mark:
            return PolicyVersion.parse(unmarked(label))
        if mark is not None:
            raise self.taken(mark)
        raise EngineRestartedError(
            f"engine {self.engine} at {self.url} calls its weights {label!r}, without this run's mark: it has started "
            "again, or somebody has renamed them"
        )

    def served(self, info: Mapping[str, Any]) -> PolicyVersion:
        """What ``/model_info`` calls the weights, below any adapter.

        Raises:
            EngineError: it names no version, or none of this run's.
            EngineTakenError: it bears another run's mark.
        """
        try:
            return self.read(info["weight_version"])
        except (LookupError, ValueError) as error:
            raise EngineError(f"engine {self.engine}: /model_info names no policy version: {error}") from error

    def check(self, label: object) -> None:
        """That a label bears no other run's mark. Raises EngineTakenError."""
        if (mark := mark_of(label)) not in (None, self.mark):
            raise self.taken(str(mark))

    def taken(self, mark: str) -> EngineTakenError:
        """What is to be said of an engine that bears another run's mark."""
        return EngineTakenError(
            f"engine {self.engine} at {self.url} belongs to the run '{mark}' by now, which may change its weights at "
            "any moment. End that run, then resume this one; or give each run engines of its own"
        )

    def refused(self, mark: str | None) -> EngineTakenError:
        """What is to be said to a run that finds an engine marked."""
        return EngineTakenError(
            f"engine {self.engine} at {self.url} belongs to the run '{mark}'. End that run, or give this one another "
            "engine (engine.urls). If that run is gone for good, killed for instance, take its engines over: set "
            f'engine.take_over = "{mark}" in this run\'s policy, or resume that run'
        )
