"""The mixer "gru" with packed products: its numbers, whatever it shares a call with, and its size."""

import pytest
import torch
from tests.decoding.test_linear import by_torch, kept_inputs
from torch import nn

from recurra import state as states
from recurra.decoding.linear import DecodingLinear
from recurra.decoding.packing import pack_linear_layers
from recurra.decoding.steps import CompiledStep, prepare
from recurra.mixers.gru import GRU, GRUState
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import tensors

ROUNDED = ("bfloat16", "int8", "int4")
pytestmark = pytest.mark.compile


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def packed(mixer, numbers):
    return pack_linear_layers(nn.ModuleList([mixer]), numbers)[0]


def language_model(d_model=24):
    return LanguageModel(LanguageModelConfig(31, None, 2, d_model, 41, mixer="gru")).eval()


def rounding_of(weight, numbers):
    """How far each number may be from the weight: half a step."""
    size = weight.abs().amax(1, keepdim=True)
    if numbers == "bfloat16":
        return weight.abs() * 2**-8 / 2
    if numbers == "int8":
        return (size / 254).expand_as(weight)
    spread = weight.amax(1, keepdim=True) - weight.amin(1, keepdim=True)
    return (spread / 30 + 2**-10 * (size + spread)).expand_as(weight)  # with the minimum's and scale's float16


def error_bound(layer, weight, x):
    """How far a packed product may be from that with `weight`."""
    kept = kept_inputs(layer, x)
    return kept.abs() @ rounding_of(weight, layer.dtype).t() + (kept - x).abs() @ weight.abs().t()


@pytest.mark.parametrize("numbers", ROUNDED)
def test_a_step_is_within_what_rounding_moves(numbers):
    mixer = GRU(40).eval()
    cell, mine = mixer.cell, packed(mixer, numbers)
    x, h = torch.randn(5, 40), torch.rand(5, 40) * 2 - 1
    found, _ = mine(x[:, None], GRUState(h))
    expected, _ = mixer(x[:, None], GRUState(h))
    of_x = error_bound(mine.cell.of_x, cell.weight_ih, x).chunk(3, 1)
    of_h = error_bound(mine.cell.of_h, cell.weight_hh, h).chunk(3, 1)
    c_h = by_torch(mine.cell.of_h, h).abs().float().chunk(3, 1)[2]
    # sigmoid' <= 1/4, tanh' <= 1, gates are below 1 and |h - c| < 2
    of_candidate = of_x[2] + of_h[2] + (of_x[0] + of_h[0]) / 4 * c_h
    bound = of_candidate + (of_x[1] + of_h[1]) / 4 * 2
    error = (found - expected)[:, 0].abs()
    assert (error <= bound + 1e-6).all()
    assert (error > 1e-6).any()
    exact, _ = packed(mixer, "float32")(x[:, None], GRUState(h))
    assert torch.equal(exact, expected)


@pytest.mark.parametrize("numbers", ROUNDED)
def test_cuts_do_not_change_a_bit(numbers):
    mixer, x = packed(GRU(40).eval(), numbers), torch.randn(9, 21, 40)
    y, last = mixer(x)
    pieces, state = [], None
    for piece in x.split([1, 4, 15, 1], 1):
        part, state = mixer(piece, state)
        pieces.append(part)
    assert torch.equal(torch.cat(pieces, 1), y)
    assert torch.equal(state.h, last.h)


@pytest.mark.parametrize("numbers", ROUNDED)
def test_compiled_steps_and_prompts_are_the_operations(numbers):
    compiled = prepare(language_model(), numbers)
    assert type(compiled) is CompiledStep
    names = {type(module) for module in compiled.model.modules()}
    assert DecodingLinear in names
    assert not names & {nn.GRUCell, nn.Linear}
    prompt = torch.randint(31, (1, 11))
    logits, last = compiled(prompt)
    state, steps = compiled.model.initial_state(1), []
    for token in prompt.split(1, 1):
        step, state = compiled(token, state)
        steps.append(step)
    assert torch.equal(torch.cat(steps, 1), logits)
    assert all(map(torch.equal, tensors(state), tensors(last)))
    expected, _ = compiled.model(prompt)
    assert (logits - expected).norm() <= 0.1 * expected.norm()  # an input between two codes may be rounded to either
    together = states.concatenate([state] * 9)
    many, _ = compiled(prompt[:, :1].expand(9, 1), together)
    assert torch.equal(many[7:8], compiled(prompt[:, :1], state)[0])


@pytest.mark.parametrize(("numbers", "bits"), [("bfloat16", 16), ("int8", 8), ("int4", 4.5)])
def test_its_weights_are_as_small_as_those_of_linear_layers(numbers, bits):
    mixer = GRU(128)
    mine = packed(mixer, numbers)
    size = sum(tensor.nbytes for tensor in (*mine.parameters(), *mine.buffers()))
    n_outputs, n_weights = 2 * 3 * 128, 2 * 3 * 128 * 128
    assert size == n_weights * bits / 8 + n_outputs * (4 + 4)  # a scale and a bias
