import pytest
import torch
from torch import nn

from recurra.train.config import OptimizerConfig
from recurra.train.optimizer import parameter_groups


def by_name(model: nn.Module, config: OptimizerConfig) -> dict[str, tuple[float, float]]:
    """Parameter name -> (learning rate, weight decay)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in parameter_groups(model, config)
        for parameter in group["params"]
    }


@pytest.mark.parametrize(("decay", "expected"), [(None, 0.0), (0.0, 0.0), (0.7, 0.7)])
def test_the_transition_has_its_own_rates(toy_model, decay, expected):
    config = OptimizerConfig(learning_rate=0.1, transition_learning_rate=0.02, transition_weight_decay=decay)
    rules = by_name(toy_model, config)
    assert rules["decay"] == (0.02, expected)
    assert rules["norm.bias"] == (0.1, 0.0)


def test_patterns_of_names_set_rates_and_the_last_that_fits_counts(toy_model):
    rates = {"*.weight": 0.3, "norm.*": 0.7, "decay": 0.9}
    config = OptimizerConfig(
        learning_rate=0.1, weight_decay=0.5, transition_learning_rate=0.02, parameter_learning_rates=rates
    )
    assert by_name(toy_model, config) == {
        "embedding.weight": (0.3, 0.5),
        "decay": (0.9, 0.0),
        "norm.weight": (0.7, 0.0),
        "norm.bias": (0.7, 0.0),
        "head.bias": (0.1, 0.0),
    }


def test_muon_still_makes_matrices_orthogonal_whose_rate_a_pattern_sets():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    config = OptimizerConfig(algorithm="muon", parameter_learning_rates={"1.*": 0.5})
    groups = parameter_groups(model, config)
    assert {(group["lr"], group["orthogonal"]) for group in groups if group["name"].startswith("1.*")} == {
        (0.5, True),
        (0.5, False),
    }


def test_a_pattern_that_fits_no_parameter_is_refused(toy_model):
    message = r"^optimizer.parameter_learning_rates is a mapping with 'embeddings', which fits no parameter; expected"
    with pytest.raises(ValueError, match=message):
        parameter_groups(toy_model, OptimizerConfig(parameter_learning_rates={"embeddings": 0.5}))


def test_a_transition_parameter_of_another_model_is_refused(toy_model):
    toy_model.transition_parameters = lambda: {nn.Parameter(torch.zeros(3))}
    with pytest.raises(ValueError, match=r"ToyModel\.transition_parameters\(\) is a list with 1 tensor"):
        parameter_groups(toy_model, OptimizerConfig())


@pytest.mark.parametrize("name", ["transition_learning_rate", "transition_weight_decay"])
def test_settings_for_parameters_that_a_model_does_not_have_are_refused(name):
    message = f"optimizer.{name} is 0.5, for a model without parameters that make a state transition; expected null"
    with pytest.raises(ValueError, match=message):
        parameter_groups(nn.Linear(2, 3), OptimizerConfig(**{name: 0.5}))
