"""A Python function as a scorer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from agentrl.process.threads import run_in_thread
from agentrl.types.environment import Score, check_score
from agentrl.types.episode import Episode
from agentrl.types.errors import Boundary, boundary, deadline


class FunctionScorer:
    """Calls a function with the whole episode; it gives a number or a `Score`, and may be a coroutine.

    One that is none runs in a thread of its own, so that it never holds up the run, nor its end if it hangs.
    """

    def __init__(self, function: Callable[[Episode], object], name: str, weight: float, timeout_s: float) -> None:
        self.name, self.weight = name, weight
        self._function, self._timeout_s = function, timeout_s

    async def score(self, episode: Episode) -> Score:
        """The function's verdict. Raises EpisodeError (boundary scorer, or its deadline)."""
        async with deadline(f"scorer.{self.name}", self._timeout_s):
            with boundary(Boundary.SCORER, self.name):
                value = await self._call(episode)
                return check_score(value if isinstance(value, Score) else Score(value))

    async def _call(self, episode: Episode) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(episode)
        return await run_in_thread(f"scorer-{self.name}", lambda: self._function(episode))
