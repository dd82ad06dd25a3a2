"""Environments of which each breaks one promise, named ``agentrl.testing.broken_environments:NAME``."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.config.base import ConfigModel
from agentrl.envs.authoring import Generated, Rows, ToolEnvironment, call, define, say, tool
from agentrl.envs.definition import EnvironmentDefinition
from agentrl.types.message import Message
from agentrl.types.task import Split, Task


class Sound(ToolEnvironment):
    """Counts letters, and keeps every promise."""

    def prepare(self) -> None:
        """Nothing was counted yet."""
        self.counted = 0

    def prompt(self) -> str:
        """The question."""
        return f"how often is there an {self.row['letter']} in {self.row['word']}?"

    @tool
    def count(self, letter: str) -> int:
        """Count a letter."""
        self.counted += 1
        return int(self.row["word"].count(letter))

    def reward(self) -> float:
        """1.0 for the right number after at least one count."""
        right = str(self.row["word"].count(self.row["letter"]))
        return float(self.answer == right and self.counted > 0)

    def save(self) -> Any:
        """How often it was counted."""
        return self.counted

    def load(self, state: Any) -> None:
        """As often as another one counted."""
        self.counted = state


def play_rightly(row: Mapping[str, Any], messages: Sequence[Message]) -> Message:
    """Count, then answer."""
    return call("count", letter=row["letter"]) if len(messages) == 1 else say(messages[-1].content)


WORDS = Rows([{"word": word, "letter": "e"} for word in "tree bee seem elk sea pie ear hat web gem eve red".split()])


class Forgetful(Sound):
    """Forgets in a snapshot what it has counted."""

    def save(self) -> Any:
        """Nothing of it."""
        return 0


class Fickle(Sound):
    """Answers by the clock."""

    @tool
    def count(self, letter: str) -> int:
        """Count a letter."""
        return time.monotonic_ns()


_shared: list[str] = []


class Shared(Sound):
    """Keeps its question where every instance of the process does."""

    def prompt(self) -> str:
        """The question."""
        _shared.append(self.row["word"])
        return super().prompt()

    @tool
    def count(self, letter: str) -> int:
        """Count a letter, in the last question that anybody asked."""
        self.counted += 1
        return _shared[-1].count(letter)


class Strict(Sound):
    """Takes a wrong answer for a fault of its own."""

    def reward(self) -> float:
        """Raises where the policy was wrong."""
        return float(int(self.answer or "none"))


class Infinite(Sound):
    """Rewards without bound."""

    def reward(self) -> float:
        """More than there is."""
        return float("inf")


class Unreachable(Sound):
    """Rewards nobody."""

    def reward(self) -> float:
        """Nothing, whatever was said."""
        return 0.0


class Fragile(Sound):
    """Has a tool that does not stand what its own schema allows."""

    @tool
    def count(self, letter: str) -> int:
        """Count a letter."""
        return {"e": 1}[letter]


class Leaky(Sound):
    """Opens a file for every episode and closes none."""

    opened: list[Any] = []

    def prepare(self) -> None:
        """Open one."""
        super().prepare()
        self.opened.append(open(os.devnull))  # noqa: SIM115


class Threaded(Sound):
    """Starts a thread for every episode that waits for ever."""

    def prepare(self) -> None:
        """Start one."""
        super().prepare()
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class Orphaning(Sound):
    """Starts a process that outlives its worker."""

    def prepare(self) -> None:
        """Start one, in a session of its own."""
        super().prepare()
        argv = [sys.executable, "-c", "import time; time.sleep(60)"]
        self._process = subprocess.Popen(argv, start_new_session=True)

    def free(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


class Hanging(Sound):
    """Never comes back from its reward."""

    def reward(self) -> float:
        """Waits longer than anybody does."""
        time.sleep(3600)
        return 0.0


_drawn = itertools.count()


def _draw_anew(options: ConfigModel, split: Split, ordinal: int, seed: int) -> Task:
    return Task("restless", split, ordinal, {"word": "tree", "letter": "e", "draw": next(_drawn)})


def _defined(name: str, kind: type[ToolEnvironment], is_deterministic: bool = True) -> EnvironmentDefinition[Any]:
    return define(name, kind, WORDS, gold=play_rightly, is_deterministic=is_deterministic)


sound = _defined("sound", Sound)
forgetful = _defined("forgetful", Forgetful)
fickle = _defined("fickle", Fickle)
shared = replace(_defined("shared", Shared), placement="inline")
strict = _defined("strict", Strict)
infinite = _defined("infinite", Infinite)
unreachable = _defined("unreachable", Unreachable)
fragile = _defined("fragile", Fragile)
leaky = _defined("leaky", Leaky)
threaded = _defined("threaded", Threaded)
orphaning = _defined("orphaning", Orphaning)
hanging = _defined("hanging", Hanging)
restless = replace(sound, name="restless", sample_task=_draw_anew, num_tasks=None)
leaking_tasks = define("leaking_tasks", Sound, Generated(lambda chance: {"word": "tree", "letter": "e"}))
