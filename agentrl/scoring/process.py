"""A scorer in a process of its own: ``python -m agentrl.scoring.process FD``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from agentrl.config.base import parse_config
from agentrl.process.server import serve
from agentrl.protocols import Scorer
from agentrl.scorers.config import find_definition
from agentrl.scorers.definition import ScorerSetting
from agentrl.types.errors import Boundary, boundary
from agentrl.types.turn_score import ScoredTurn, TurnScore


class ScorerProcess:
    """What the run calls in a scorer's process."""

    def __init__(self) -> None:
        self._scorer: Scorer | None = None
        self._name = ""

    async def build(self, kind: str, config: str, models: dict[str, str]) -> None:
        """Make the scorer. Raises ConfigError."""
        definition = find_definition(kind)
        values = parse_config(definition.config, msgspec.json.decode(config), f"scorer of kind {kind}")
        self._name = values.name
        with boundary(Boundary.SCORER, self._name):
            setting = ScorerSetting({policy: Path(folder) for policy, folder in models.items()})
            self._scorer = await definition.build(values, setting)

    async def score(self, turns: list[ScoredTurn]) -> list[TurnScore]:
        """What the scorer says of them. Raises EpisodeError."""
        assert self._scorer is not None
        with boundary(Boundary.SCORER, self._name):
            scores: Sequence[TurnScore] = await self._scorer.score(turns)
        return list(scores)


def main() -> None:
    """Entry of the child."""
    serve(ScorerProcess(), int(sys.argv[1]))


if __name__ == "__main__":
    main()
