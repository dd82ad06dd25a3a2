"""Builds optimizers over sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from agentrl.trainer.config import OptimizerConfig

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_LEAST_SCALE = 0.1


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz (Keller Jordan, 2024), for matrices that may be sharded.

    The momentum is kept in shards; the update is computed on the whole matrix on every rank. Scaled by
    sqrt(max(1, rows / columns)), as its author does. Weight decay is decoupled.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], lr: float, momentum: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    # The base class also has a form that returns what a closure gives; ours are never given one.
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every matrix by one orthogonalised momentum."""
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                nesterov = parameter.grad.lerp(momentum, group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(_orthogonalised(nesterov), alpha=-group["lr"])


class OptimizerSet:
    """One or two optimizers that act as one, with a common scale of their learning rates."""

    def __init__(self, policy: torch.nn.Module, config: OptimizerConfig) -> None:
        self.parts = _build(policy, config)
        self._base_rates = [[group["lr"] for group in part.param_groups] for part in self.parts]

    def step(self, lr_scale: float) -> None:
        """Apply the gradients with learning rates times `lr_scale`, then clear them."""
        for part, rates in zip(self.parts, self._base_rates, strict=True):
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate * lr_scale
            part.step()
        self.clear()

    def clear(self) -> None:
        """Forget the gradients."""
        for part in self.parts:
            part.zero_grad()


def decayed(config: OptimizerConfig, step: int) -> float:
    """What the learning rates of a step are to be multiplied with: 1 at step 0, a tenth from `decay_steps` on.

    Example: with `decay_steps` 40, step 20 has 0.55 times the rates of step 0.
    """
    if not config.decay_steps:
        return 1.0
    return 1.0 - (1.0 - _LEAST_SCALE) * min(step / config.decay_steps, 1.0)


def _build(policy: torch.nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    parameters = [p for p in policy.parameters() if p.requires_grad]
    betas = (config.momentum, config.second_beta)
    adam: dict[str, Any] = {"betas": betas, "weight_decay": config.weight_decay}
    if config.kind == "adamw":
        return [torch.optim.AdamW(parameters, lr=config.learning_rate, **adam)]
    decay = config.weight_decay
    if config.kind == "sgd":
        return [torch.optim.SGD(parameters, lr=config.learning_rate, momentum=config.momentum, weight_decay=decay)]
    matrices = [p for n, p in policy.named_parameters() if p.requires_grad and _is_block_matrix(n, p)]
    chosen = {id(p) for p in matrices}
    rest = [p for p in parameters if id(p) not in chosen]
    muon = Muon(matrices, lr=config.learning_rate, momentum=config.momentum, weight_decay=decay)
    # Adapters are matrices all of them: then nothing is left.
    return [muon, torch.optim.AdamW(rest, lr=config.rest_learning_rate, **adam)] if rest else [muon]


def _is_block_matrix(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim == 2 and "embed" not in name and "lm_head" not in name


def _orthogonalised(update: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrix to an update, approximately, laid out like the update."""
    whole = update.full_tensor() if isinstance(update, DTensor) else update
    matrix: torch.Tensor = whole / (whole.norm() + 1e-7)
    is_tall = matrix.shape[0] > matrix.shape[1]
    matrix = matrix.T if is_tall else matrix
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = matrix @ matrix.T
        matrix = a * matrix + (b * gram + c * gram @ gram) @ matrix
    matrix = matrix.T if is_tall else matrix
    matrix = matrix * max(1.0, whole.shape[0] / whole.shape[1]) ** 0.5
    if not isinstance(update, DTensor):
        return matrix
    return distribute_tensor(matrix, update.device_mesh, update.placements, src_data_rank=None)
