"""LoRA adapters of one engine: which one generations use, and when an old one may go."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from agentrl.types.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that an engine has loaded; its name holds its version."""

    name: str
    version: PolicyVersion


_PREFIX = "adapter-"


def adapter_name(label: PolicyVersion | str) -> str:
    """The name of a version's adapter, with its run's mark if it has one. Example: ``adapter-0.7``."""
    return f"{_PREFIX}{label}"


def is_adapter_name(name: str) -> bool:
    """Whether a run gave an adapter this name."""
    return name.startswith(_PREFIX)


class AdapterShelf:
    """The adapters on one engine.

    Invariant: every adapter on the shelf is the newest, or some generation still uses it. A generation
    keeps the adapter that it began with; the next one takes the newest.
    """

    def __init__(self) -> None:
        self.newest: Adapter | None = None
        self._users: Counter[str] = Counter()

    def begin(self) -> Adapter | None:
        """The adapter for a new generation; None if the engine serves bare weights."""
        if self.newest is not None:
            self._users[self.newest.name] += 1
        return self.newest

    def end(self, adapter: Adapter) -> bool:
        """A generation is over; True if its adapter is to be unloaded now."""
        self._users[adapter.name] -= 1
        return self._is_idle(adapter)

    def put(self, adapter: Adapter) -> Adapter | None:
        """A newer adapter was loaded; returns the one before it if that is to be unloaded now."""
        old, self.newest = self.newest, adapter
        return old if old is not None and old != adapter and self._is_idle(old) else None

    def _is_idle(self, adapter: Adapter) -> bool:
        return adapter != self.newest and not self._users[adapter.name]
