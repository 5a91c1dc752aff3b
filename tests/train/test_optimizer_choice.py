"""Which optimiser is built, and which options belong to which."""

import pytest
import torch
from torch.optim import SGD, AdamW

from recurra.train import config as optimizer_registry
from recurra.train.config import OptimizerConfig, list_optimizers, register_optimizer
from recurra.train.optimizer import build_optimizer
from recurra.train.recipe import load_recipe, to_yaml


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


def test_the_name_chooses(toy_model):
    assert type(build_optimizer(toy_model, OptimizerConfig())) is AdamW
    assert type(build_optimizer(toy_model, OptimizerConfig(algorithm="sgd"))) is SGD


def test_the_options_reach_torch(toy_model):
    adamw = build_optimizer(toy_model, OptimizerConfig(betas=(0.1, 0.2), epsilon=0.3)).defaults
    assert (adamw["betas"], adamw["eps"]) == ((0.1, 0.2), 0.3)
    sgd = build_optimizer(toy_model, OptimizerConfig(algorithm="sgd", momentum=0.4, nesterov=True)).defaults
    assert (sgd["momentum"], sgd["nesterov"]) == (0.4, True)


def test_the_defaults():
    assert OptimizerConfig().options == {"betas": (0.9, 0.98), "epsilon": 1e-8}
    assert OptimizerConfig(algorithm="sgd").options == {"momentum": 0.9, "nesterov": False}
    muon = {"matrix_learning_rate": 0.01, "momentum": 0.95, "nesterov": True, "betas": (0.9, 0.98), "epsilon": 1e-8}
    assert OptimizerConfig(algorithm="muon").options == muon


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


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"momentum": 1.0}, "momentum"),
        ({"momentum": -0.1}, "momentum"),
        ({"momentum": 0.0, "nesterov": True}, "nesterov"),
    ],
)
def test_impossible_options_of_sgd_are_refused(options, field):
    with pytest.raises(ValueError, match=rf"^optimizer\.{field} is .*; expected"):
        OptimizerConfig(algorithm="sgd", **options)


def test_a_recipe_chooses_and_its_complete_form_says_the_same(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "experiment: memory-horizon\n"
        "optimizer: {algorithm: sgd, learning_rate: 0.005, weight_decay: 0.0001}\n"
        "schedule: {shape: steps, steps: [11, 14]}\n"
    )
    experiment = load_recipe(recipe, ["--optimizer.nesterov", "true", "--schedule.steps", "[2, 3]"])
    assert experiment.optimizer.options == {"momentum": 0.9, "nesterov": True}
    assert experiment.schedule.steps == [2, 3]
    recipe.write_text(to_yaml(experiment))
    assert load_recipe(recipe) == experiment
    with pytest.raises(ValueError, match=r"optimizer\.betas is .*; expected null when"):
        load_recipe(recipe, ["--optimizer.betas", "[0.9, 0.99]"])


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


def test_options_of_ones_own_keep_their_names_and_are_checked_by_it_alone(toy_model, monkeypatch):
    class Own(torch.optim.SGD):
        def __init__(self, groups, lr, epsilon=1.0, matrix_learning_rate=0.5, betas=(), momentum=0.0):
            super().__init__(groups, lr)
            self.found = {"epsilon": epsilon, "matrix_learning_rate": matrix_learning_rate}
            self.found |= {"betas": betas, "momentum": momentum}

    monkeypatch.setattr(optimizer_registry._optimizers, "_entries", dict(optimizer_registry._optimizers._entries))
    register_optimizer("own")(Own)
    options = {"epsilon": 0.01, "matrix_learning_rate": 0.1, "betas": None, "momentum": 1.0}
    assert build_optimizer(toy_model, OptimizerConfig(algorithm="own", own_options=options)).found == options
    with pytest.raises(ValueError, match=r"own_options is options with 'lr' for own; expected some of epsilon, matrix"):
        build_optimizer(toy_model, OptimizerConfig(algorithm="own", own_options={"lr": 0.1}))


def test_what_belongs_to_ones_own_is_refused_for_others():
    with pytest.raises(ValueError, match=r"^optimizer.own_options is .*; expected none when .* is adamw"):
        OptimizerConfig(own_options={"scale": 2.0})
    with pytest.raises(ValueError, match=r"^optimizer.algorithm is 'lion'; expected one of adamw, muon, "):
        OptimizerConfig(algorithm="lion")
