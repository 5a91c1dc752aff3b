"""Optimisers: which parameters have which rates, which is built, Muon and SOAP."""

import copy
import signal
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from tests.train.conftest import on_call, quiet, same_weights
from tests.train.test_loop import records
from torch import nn
from torch.optim import SGD, AdamW

from recurra.mixers import create_mixer
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.train import config as optimizer_registry
from recurra.train._muon import Muon, _orthogonalise, matrix_ids
from recurra.train.config import OptimizerConfig, list_optimizers, register_optimizer
from recurra.train.optimizer import build_optimizer, parameter_groups


def by_name(model: nn.Module, config: OptimizerConfig) -> dict[str, tuple[float, float]]:
    """Parameter name -> (learning rate, weight decay)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in parameter_groups(model, config)
        for parameter in group["params"]
    }


@pytest.mark.parametrize("decay", [0.0, 0.7])
def test_the_transition_has_its_own_rates(decay):
    config = OptimizerConfig(learning_rate=0.1, transition_learning_rate=0.02, transition_weight_decay=decay)
    rules = by_name(create_mixer("gateloop", 4), config)
    assert rules["transition.projection.weight"] == (0.02, decay)
    assert rules["transition.projection.bias"] == (0.02, 0.0)
    assert rules["output_projection.weight"] == (0.1, 0.05)


@pytest.mark.parametrize(
    ("mixer", "names"),
    [
        ("gateloop", "transition.projection.weight"),
        ("gated-delta-net", "A_log dt_bias decay_projection.weight"),
        ("h3", "log_decay log_step frequency skip"),
        ("kda", "A_log dt_bias"),
        ("hyena", "skips"),
        ("lru", "nu theta skip"),
        ("mamba", "log_decay step_bias skip"),
        ("mamba2", "log_decay step_bias skip"),
        ("mamba3", "b_bias c_bias step_bias skip"),
        ("relative-attention", "content_bias position_bias"),
        ("s4d", "log_decay log_step frequency skip"),
    ],
)
def test_time_scales_biases_and_skips_do_not_decay(mixer, names):
    rules = by_name(create_mixer(mixer, 8), OptimizerConfig(weight_decay=0.1))
    assert {name: rules[name][1] for name in names.split()} == dict.fromkeys(names.split(), 0.0)
    weight = "output_weights" if mixer == "lru" else "output_projection.weight"
    assert rules[weight][1] == 0.1


@pytest.mark.parametrize("setting", ["transition_learning_rate", "transition_weight_decay"])
def test_settings_of_a_transition_that_a_model_lacks_are_said_and_not_used(setting):
    """So that a recipe for a GateLoop trains a GRU, too."""
    model = torch.nn.Linear(3, 3)
    with pytest.warns(UserWarning, match=f"optimizer.{setting} is not used: the model has no parameters that make"):
        groups = parameter_groups(model, OptimizerConfig(learning_rate=0.1, **{setting: 0.02}))
    assert {group["lr"] for group in groups} == {0.1}
    assert groups[0]["weight_decay"] == OptimizerConfig().weight_decay


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


def test_options_reach_the_optimiser(toy_model):
    options = {"momentum": 0.7, "nesterov": True}
    built = build_optimizer(toy_model, OptimizerConfig(algorithm="sgd", weight_decay=0.05, **options))
    assert type(built) is SGD
    assert {(group["momentum"], group["nesterov"]) for group in built.param_groups} == {(0.7, True)}
    assert {group["weight_decay"] for group in built.param_groups} == {0.0, 0.05}
    (group, *_) = build_optimizer(toy_model, OptimizerConfig(epsilon=1e-5)).param_groups
    assert (group["betas"], group["eps"]) == ((0.9, 0.98), 1e-5)


@pytest.mark.parametrize(
    ("algorithm", "field", "value"),
    [
        ("adamw", "momentum", 0.9),
        ("sgd", "betas", (0.9, 0.9)),
        ("adamw", "matrix_learning_rate", 0.1),
    ],
)
def test_an_option_of_another_algorithm_is_refused(algorithm, field, value):
    with pytest.raises(ValueError, match=rf"^optimizer\.{field} is .*; expected null when .* is {algorithm}"):
        OptimizerConfig(algorithm=algorithm, **{field: value})


def test_an_optimiser_of_ones_own_gets_its_groups_and_options(toy_model, restored):
    class Signs(torch.optim.Optimizer):
        def __init__(self, groups, lr, scale=1.0):
            super().__init__(groups, {"lr": lr, "scale": scale})

    restored(optimizer_registry._optimizers)
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


# --- Muon ---


def gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def train(model: nn.Module, optimizers: list, steps: range) -> nn.Module:
    for step in steps:
        gradients(model, step)
        for optimizer in optimizers:
            optimizer.step()
    return model


def groups(model: nn.Module, **options) -> list[dict]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": vectors, "orthogonal": False}, {"params": matrices, "orthogonal": True, **options}]


@pytest.fixture
def network() -> nn.Module:
    """Two matrices alike, one tall and one wide."""
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 12), nn.Linear(12, 5))


@pytest.mark.parametrize("shape", [(7, 7), (3, 11), (11, 3), (1, 4)])
def test_singular_values_come_near_one_and_singular_vectors_stay(shape):
    matrices = torch.randn(2, *shape, dtype=torch.float64)
    u, before, v = torch.linalg.svd(matrices, full_matrices=False)
    after = u.mT @ _orthogonalise(matrices) @ v.mT
    values = torch.diagonal(after, dim1=1, dim2=2)
    torch.testing.assert_close(after, torch.diag_embed(values), rtol=0, atol=1e-9)
    large = before > 0.05 * before.norm(dim=1, keepdim=True)
    assert ((values[large] > 0.6) & (values[large] < 1.3)).all()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")
@pytest.mark.parametrize("nesterov", [False, True])
def test_matrices_are_updated_as_by_torch(network, nesterov, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())  # torch's is in bfloat16 everywhere
    options = {"lr": 0.03, "weight_decay": 0.2, "momentum": 0.8, "nesterov": nesterov}
    theirs = copy.deepcopy(network).double()
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    train(theirs, [torch.optim.Muon(matrices, **options), AdamW(vectors, lr=0.1)], range(4))
    network.double()
    own = [{"params": [p for p in network.parameters() if p.ndim == 1], "orthogonal": False, "lr": 0.1}]
    own[0] |= {"weight_decay": 0.01, "betas": (0.9, 0.999)}
    own += [{"params": [p for p in network.parameters() if p.ndim == 2], "orthogonal": True}]
    train(network, [Muon(own, **options)], range(4))
    for mine, other in zip(network.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def test_a_loaded_state_continues_bit_for_bit(network):
    whole = copy.deepcopy(network)
    train(whole, [Muon(groups(whole, lr=0.02))], range(5))
    first = Muon(groups(network, lr=0.02))
    train(network, [first], range(3))
    second = Muon(groups(network, lr=0.5))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(network, [second], range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), whole.parameters()))


@pytest.fixture
def eight_ranks():
    """A mesh of eight ranks of which this process is the first; the others exchange nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


@pytest.mark.parametrize("n_rows", [1, 4, 8, 12])
def test_a_sharded_matrix_may_have_fewer_rows_than_there_are_ranks(eight_ranks, n_rows):
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = [torch.randn(n_rows, 64) for _ in range(4)]
    first, second, *gradients = (distribute_tensor(tensor, eight_ranks, [Shard(0)]) for tensor in whole)
    parameters = [nn.Parameter(first), nn.Parameter(second)]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient
    Muon([{"params": parameters, "orthogonal": True}], lr=0.1).step()
    for parameter, before in zip(parameters, whole):
        assert parameter.placements == (Shard(0),)
        assert not torch.equal(parameter.to_local(), before[: len(parameter.to_local())])


def test_the_maps_between_hidden_channels_are_its_matrices():
    options = {"d_qk": 4, "d_v": 4, "n_heads": 4, "transition": "data"}
    model = LanguageModel(
        LanguageModelConfig(
            vocab_size=11, n_layer=1, d_model=4, mixer="gateloop", d_channel_mixing=8, mixer_options=options
        )
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = {names[key] for key in matrix_ids(model)}
    transition = "blocks.0.mixer.transition.projection.weight"
    assert own - {transition} == {
        "blocks.0.mixer.qkv.weight",
        "blocks.0.mixer.output_projection.weight",
        "blocks.0.feed_forward.0.weight",
        "blocks.0.feed_forward.3.weight",
    }
    found = parameter_groups(model, OptimizerConfig(algorithm="muon", learning_rate=0.1, matrix_learning_rate=0.3))
    rates = {
        names[id(p)]: (group["lr"], group["peak_lr"], group["orthogonal"]) for group in found for p in group["params"]
    }
    assert {name for name, rate in rates.items() if rate == (0.3, 0.3, True)} == own - {transition}
    assert all(rates[name] == (0.1, 0.1, False) for name in rates.keys() - (own - {transition}))


# --- SOAP ---

soap = pytest.mark.skipif(find_spec("pytorch_optimizer") is None, reason="needs the extra optimizers")


@soap
@soap
@pytest.mark.parametrize("stop_at", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(make_trainer, stop_at):
    settings = {"log_every": 1, "save_every": 4, "eval_every": 1}
    optimizer = {"algorithm": "soap", "precondition_frequency": 2}
    whole = make_trainer("whole", optimizer=optimizer, **settings)
    whole.fit(quiet())
    first = make_trainer("parts", optimizer=optimizer, scorer=on_call(stop_at), **settings)
    assert first.fit(quiet()).received == signal.SIGTERM
    second = make_trainer("parts", optimizer=optimizer, **settings)
    second.resume("last")
    assert second.position.step == stop_at
    second.fit(quiet())
    assert records(second) == records(whole)
    assert same_weights(second, whole)
