import copy

import pytest
import torch
from torch import nn

from recurra.streams.snapshot import ModelIdentity, weights_fingerprint

from .conftest import build


def test_the_same_weights_have_the_same_fingerprint(model):
    assert weights_fingerprint(model) == weights_fingerprint(copy.deepcopy(model))


def test_one_bit_of_one_weight_makes_another(model):
    fingerprints = {weights_fingerprint(model)}
    names = list(dict(model.named_parameters()))
    for name in names:
        twin = copy.deepcopy(model)
        parameter = twin.get_parameter(name)
        with torch.no_grad():
            last = parameter.view(-1)[-1:]
            last.copy_(torch.nextafter(last, torch.full_like(last, torch.inf)))
        fingerprints.add(weights_fingerprint(twin))
    assert len(fingerprints) == 1 + len(names)


def test_rounding_names_and_shapes_make_others():
    torch.manual_seed(0)
    layer = nn.Linear(3, 4, bias=False)
    reshaped = nn.Linear(4, 3, bias=False)
    reshaped.weight = nn.Parameter(layer.weight.detach().reshape(3, 4))
    modules = [layer, reshaped, nn.Sequential(layer), copy.deepcopy(layer).double(), copy.deepcopy(layer).bfloat16()]
    assert len({weights_fingerprint(module) for module in modules}) == len(modules)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.bool, torch.int16, torch.float16])
def test_buffers_of_any_type_count(dtype):
    one, two = nn.Module(), nn.Module()
    one.register_buffer("b", torch.ones(3, dtype=dtype))
    two.register_buffer("b", torch.tensor([1, 1, 0]).to(dtype))
    assert weights_fingerprint(one) != weights_fingerprint(two)


def test_differences_are_named():
    one = ModelIdentity.of(build("gateloop"))
    assert one.difference(ModelIdentity.of(build("gateloop"))) is None
    retrained = ModelIdentity.of(build("gateloop", seed=1))
    assert one.difference(retrained) == "a LanguageModel like it with other weights"
    assert one.difference(ModelIdentity.of(build("retnet"))) == (
        "mixer 'gateloop' against 'retnet', mixer_options {} against {'n_heads': 2}"
    )
    assert one.difference(ModelIdentity.of(build("crt-gru"))) == "LanguageModel against CompactRecurrentTransformer"
    assert ModelIdentity.of(nn.Linear(2, 2)).config is None
