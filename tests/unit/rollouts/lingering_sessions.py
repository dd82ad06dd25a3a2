"""Live sessions in worker processes that take as long for a call as a test wants."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.testing.durable_environments import LastingOptions, LivingEnvironment, living
from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.message import Message

_LONGEST_S = 120.0


class Lingering(LivingEnvironment):
    """Holds up the call that a file names until that file is gone."""

    def __init__(self, options: LastingOptions, session: str | None = None, token: int = 0) -> None:
        super().__init__(options, session, token)
        self._folder = options.folder

    @classmethod
    def reattached(cls, options: LastingOptions, task: Any, handle: str, token: int) -> Lingering:
        return cls(options, handle, token)

    async def start(self) -> Opening:
        self._linger("start")
        return await super().start()

    async def step(self, action: Message) -> StepResult:
        self._linger("step")
        return await super().step(action)

    async def score(self) -> Score:
        with (self._folder / "asked").open("a") as file:
            file.write(f"{self._session}\n")
        return await super().score()

    def _linger(self, call: str) -> None:
        until = time.monotonic() + _LONGEST_S
        while (self._folder / f"hold {call}").exists():
            (self._folder / f"in {call}").touch()
            if time.monotonic() > until:
                raise TimeoutError(call)
            time.sleep(0.01)


def asked(folder: Path) -> list[str]:
    """The sessions that were asked for their verdict, once for each time."""
    file = folder / "asked"
    return file.read_text().splitlines() if file.exists() else []


lingering = replace(
    living,
    name="lingering",
    create=lambda options, task: Lingering(options),
    reattach_fenced=Lingering.reattached,
)
