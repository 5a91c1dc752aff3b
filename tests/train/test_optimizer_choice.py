"""Which optimiser is built, and which options belong to which."""

import pytest
import torch

from recurra.train import config as optimizer_registry
from recurra.train.config import OptimizerConfig, list_optimizers, register_optimizer
from recurra.train.optimizer import build_optimizer


def updates(config: OptimizerConfig, gradients: list[float]) -> list[float]:
    """A single weight, from 1, under these gradients."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.ones_(model.weight)
    optimizer = build_optimizer(model, config)
    weights = []
    for gradient in gradients:
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step()
        weights.append(model.weight.item())
    return weights


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_its_formula(nesterov):
    rate, momentum, decay = 0.1, 0.7, 0.05
    config = OptimizerConfig(
        algorithm="sgd", learning_rate=rate, momentum=momentum, nesterov=nesterov, weight_decay=decay
    )
    weight, velocity, expected = 1.0, None, []
    for gradient in (0.5, -2.0, 1.0):
        penalised = gradient + decay * weight
        velocity = penalised if velocity is None else momentum * velocity + penalised
        weight -= rate * (penalised + momentum * velocity if nesterov else velocity)
        expected.append(weight)
    assert updates(config, [0.5, -2.0, 1.0]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("algorithm", "field", "value"),
    [
        ("adamw", "momentum", 0.9),
        ("adamw", "nesterov", True),
        ("sgd", "betas", (0.9, 0.9)),
        ("sgd", "epsilon", 1e-8),
        ("adamw", "matrix_learning_rate", 0.1),
    ],
)
def test_an_option_of_another_algorithm_is_refused(algorithm, field, value):
    with pytest.raises(ValueError, match=rf"^optimizer\.{field} is .*; expected null when .* is {algorithm}"):
        OptimizerConfig(algorithm=algorithm, **{field: value})


def test_an_optimiser_of_ones_own_gets_its_groups_and_options(toy_model, monkeypatch):
    class Signs(torch.optim.Optimizer):
        def __init__(self, groups, lr, scale=1.0):
            super().__init__(groups, {"lr": lr, "scale": scale})

    monkeypatch.setattr(optimizer_registry._optimizers, "_entries", dict(optimizer_registry._optimizers._entries))
    assert register_optimizer("signs")(Signs) is Signs
    assert "signs" in list_optimizers()
    config = OptimizerConfig(algorithm="signs", learning_rate=0.3, weight_decay=0.2, own_options={"scale": 2.0})
    built = build_optimizer(toy_model, config)
    assert type(built) is Signs
    assert {group["lr"] for group in built.param_groups} == {0.3}
    assert {group["scale"] for group in built.param_groups} == {2.0}
    assert {group["weight_decay"] for group in built.param_groups} == {0.0, 0.2}
    with pytest.raises(ValueError, match=r"expected null when optimizer\.algorithm is signs"):
        OptimizerConfig(algorithm="signs", momentum=0.5)
    with pytest.raises(ValueError, match="optimizer 'adamw' is registered already"):
        register_optimizer("adamw")(Signs)


def test_what_belongs_to_ones_own_is_refused_for_others():
    with pytest.raises(ValueError, match=r"^optimizer.own_options is .*; expected none when .* is adamw"):
        OptimizerConfig(own_options={"scale": 2.0})
    with pytest.raises(ValueError, match=r"^optimizer.algorithm is 'lion'; expected one of adamw, muon, "):
        OptimizerConfig(algorithm="lion")
