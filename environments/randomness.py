"""Global random generators that packages of others draw from: each instance of an environment has its own state."""

from __future__ import annotations

import random
import threading
from types import TracebackType
from typing import Any

import numpy as np

_LOCK = threading.RLock()
_States = tuple[tuple[Any, ...], Any]


class OwnChance:
    """Puts a state of Python's and numpy's global generators in place while an instance acts, and takes it out again.

    A package that seeds these generators, or draws from them, then plays the same whatever else is drawn in its
    process, and disturbs nobody. One thread at a time is inside.

    Example::

        chance = OwnChance(7)
        with chance:
            game.reset(seed=7)  # draws from `random`
    """

    def __init__(self, seed: int) -> None:
        self._own: _States = (random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state())
        self._others = self._own

    def __enter__(self) -> None:
        _LOCK.acquire()
        self._others = _get()
        _set(self._own)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._own = _get()
        _set(self._others)
        _LOCK.release()


def _get() -> _States:
    return random.getstate(), np.random.get_state()


def _set(states: _States) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
