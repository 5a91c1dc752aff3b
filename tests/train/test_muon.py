"""Muon: its matrices against torch's own, what else it trains against AdamW, and which parameters are which."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.train._muon import Muon, _orthogonalise, matrix_ids
from recurra.train.config import OptimizerConfig
from recurra.train.optimizer import parameter_groups


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
