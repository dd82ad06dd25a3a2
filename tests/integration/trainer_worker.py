"""A trainer rank that can take up another model, algorithm and optimizer without a new process."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.process.server import serve
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import load_policy
from agentrl.trainer.optimizer import OptimizerSet
from agentrl.trainer.rank import RankSpec, TrainerRank


class ChangingRank(TrainerRank):
    """As fresh from `load` after each `become`."""

    def become(self, trainer: dict, algorithm: dict, model: str | None = None) -> None:
        if model is not None:
            self._spec = msgspec.structs.replace(self._spec, model=model)
        self._config = TrainerConfig.model_validate(trainer)
        self._algorithm = AlgorithmConfig.model_validate(algorithm)
        self._version, self._is_unproven = self._spec.version, True
        self._policy = load_policy(Path(self._spec.model), self._config)
        self._optimizer = OptimizerSet(self._policy, self._config.optimizer)


if __name__ == "__main__":
    spec = msgspec.json.decode(sys.argv[1], type=RankSpec)
    serve(ChangingRank(spec), int(sys.argv[2]))
