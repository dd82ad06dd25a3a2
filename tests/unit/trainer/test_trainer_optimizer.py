from __future__ import annotations

import math

import pytest
import torch
from trainer_reference import plain_network

from agentrl.trainer.config import OptimizerConfig
from agentrl.trainer.optimizer import Muon, OptimizerSet, decayed


def matrix(rows: int, columns: int, seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)))


def naive_orthogonal(update: torch.Tensor) -> torch.Tensor:
    """U V^T of the singular value decomposition: what the iteration approaches."""
    left, _, right = torch.linalg.svd(update, full_matrices=False)
    return left @ right


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (6, 10), (12, 3)])
def test_muon_moves_by_a_nearly_orthogonal_matrix_in_the_direction_of_the_gradient(rows, columns):
    parameter = matrix(rows, columns)
    before, gradient = parameter.detach().clone(), matrix(rows, columns, 1).detach()
    parameter.grad = gradient.clone()
    Muon([parameter], lr=0.1, momentum=0.0).step()
    step = (before - parameter.detach()) / 0.1 / math.sqrt(max(1, rows / columns))
    values = torch.linalg.svdvals(step)
    assert values.min() > 0.6
    assert values.max() < 1.3
    direction = naive_orthogonal(gradient)
    cosine = (step * direction).sum() / (step.norm() * direction.norm())
    assert cosine > 0.95


def quintic(value: float) -> float:
    """What five rounds of the iteration make of a singular value."""
    for _ in range(5):
        value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
    return value


def test_muon_of_a_matrix_of_rank_one_by_hand():
    value = quintic(1.0)
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.tensor([[4.0, 0.0], [0.0, 0.0]])
    Muon([parameter], lr=0.1, momentum=0.5).step()
    torch.testing.assert_close(parameter.data, torch.tensor([[-0.1 * value, 0], [0, 0]]), atol=1e-5, rtol=1e-4)


def test_muon_looks_ahead_along_its_momentum_by_hand():
    # Gradients diag(1, 0) and diag(0, 1) at momentum 0.6: averages (.4, 0) and (.24, .4), looked ahead
    # (.64, 0) and (.6 * .24, .4 + .6 * .4).
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = Muon([parameter], lr=1.0, momentum=0.6)
    parameter.grad = torch.diag(torch.tensor([1.0, 0.0]))
    optimizer.step()
    first = parameter.detach().clone()
    parameter.grad = torch.diag(torch.tensor([0.0, 1.0]))
    optimizer.step()
    torch.testing.assert_close(optimizer.state[parameter]["momentum"], torch.diag(torch.tensor([0.24, 0.4])))
    size = math.hypot(0.144, 0.64)
    moved = torch.diag(torch.tensor([quintic(0.144 / size), quintic(0.64 / size)]))
    torch.testing.assert_close(first - parameter.detach(), moved, rtol=1e-4, atol=1e-5)


def test_muon_shrinks_its_matrices_by_the_weight_decay():
    parameter, twin = matrix(4, 4), matrix(4, 4)
    for each, decay in ((parameter, 0.5), (twin, 0.0)):
        each.grad = matrix(4, 4, 1).detach()
        Muon([each], lr=0.1, momentum=0.9, weight_decay=decay).step()
    torch.testing.assert_close(parameter.data, twin.data - 0.1 * 0.5 * matrix(4, 4).data)


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_all_the_rest(odd_model):
    network = plain_network(odd_model)
    muon, adam = OptimizerSet(network, OptimizerConfig(kind="muon")).parts
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    matrices = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    rest = {names[id(p)] for group in adam.param_groups for p in group["params"]}
    assert matrices == {name for name in names.values() if "_proj.weight" in name}
    assert rest == set(names.values()) - matrices
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} <= rest


def test_both_optimizers_of_muon_take_the_configured_decay(odd_model):
    parts = OptimizerSet(plain_network(odd_model), OptimizerConfig(kind="muon", weight_decay=0.3)).parts
    assert [group["weight_decay"] for part in parts for group in part.param_groups] == [0.3, 0.3]


def model_of(*values: float) -> torch.nn.Module:
    module = torch.nn.Linear(len(values), 1, bias=False)
    module.weight.data = torch.tensor([values])
    return module


def test_the_first_adamw_step_is_the_sign_of_the_gradient():
    module = model_of(1.0, 2.0)
    optimizer = OptimizerSet(module, OptimizerConfig(kind="adamw", learning_rate=0.1))
    module.weight.grad = torch.tensor([[5.0, -0.01]])
    optimizer.step(1.0)
    assert module.weight.tolist()[0] == pytest.approx([0.9, 2.1], rel=1e-5)
    assert module.weight.grad is None


def test_adamw_takes_its_betas_and_decay_from_the_configuration():
    config = OptimizerConfig(kind="adamw", momentum=0.8, second_beta=0.7, weight_decay=0.3)
    (group,) = OptimizerSet(model_of(1.0), config).parts[0].param_groups
    assert (group["betas"], group["weight_decay"], group["lr"]) == ((0.8, 0.7), 0.3, 1e-6)


def test_sgd_with_momentum_by_hand():
    module = model_of(1.0)
    optimizer = OptimizerSet(module, OptimizerConfig(kind="sgd", learning_rate=0.1, momentum=0.5))
    for _ in range(2):
        module.weight.grad = torch.tensor([[1.0]])
        optimizer.step(1.0)
    # Steps of 0.1 * 1 and 0.1 * (0.5 + 1).
    assert module.weight.item() == pytest.approx(1 - 0.1 - 0.15)


@pytest.mark.parametrize(("step", "scale"), [(0, 1.0), (10, 0.775), (20, 0.55), (40, 0.1), (400, 0.1)])
def test_rates_fall_to_a_tenth_over_the_decay_steps_by_hand(step, scale):
    assert decayed(OptimizerConfig(decay_steps=40), step) == pytest.approx(scale)


def test_without_decay_steps_rates_stay():
    assert decayed(OptimizerConfig(), 10_000) == 1.0


def test_the_scale_of_the_learning_rate_does_not_pile_up():
    module = model_of(0.0)
    optimizer = OptimizerSet(module, OptimizerConfig(kind="sgd", learning_rate=1.0, momentum=0.0))
    for scale in (0.5, 0.5, 1.0):
        module.weight.grad = torch.tensor([[1.0]])
        optimizer.step(scale)
    assert module.weight.item() == pytest.approx(-2.0)
