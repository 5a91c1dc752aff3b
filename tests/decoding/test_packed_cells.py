"""The recurrent matrices of sLSTM and of CRT's cells, packed: the numbers of the dequantised layer, cuts and sizes."""

import copy

import pytest
import torch
from tests.decoding.test_linear import kept_inputs
from torch import nn

from recurra.decoding.linear import DecodingLinear
from recurra.decoding.packing import pack_linear_layers
from recurra.decoding.steps import prepare
from recurra.mixers.rnn import RNN
from recurra.mixers.slstm import SLSTM
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer as CRT
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformerConfig as CRTConfig
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.ops.cells.gru import GRUCell
from recurra.ops.cells.orthogonal import NCGRUCell
from recurra.state import tensors

SIZES = {"vocab_size": 31, "n_layer": 1, "d_model": 32, "d_channel_mixing": 41, "n_heads": 2, "segment_length": 5}
ROUNDED = ("bfloat16", "int8", "int4")
MAKERS = {"slstm": lambda: SLSTM(48), "gru": lambda: RNN(GRUCell(48, 48)), "ncgru": lambda: RNN(NCGRUCell(48, 48))}
of_each = pytest.mark.parametrize("name", MAKERS)
of_each_number = pytest.mark.parametrize("numbers", ROUNDED)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def packed(mixer, numbers):
    return pack_linear_layers(nn.ModuleList([mixer.eval()]), numbers)[0]


class _Dequantised(nn.Module):
    """A packed layer by torch in float64, from the weights and the inputs that it rounds."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.stored, self.bias, self.weight = layer, layer.stored, layer.bias, layer.weight

    def forward(self, x):
        product = kept_inputs(self.layer, x).double() @ self.layer.weight.double().t()
        return (product + self.layer.bias.double()).float()


@of_each
@of_each_number
def test_its_steps_are_those_of_the_dequantised_layer(name, numbers):
    mine = packed(MAKERS[name](), numbers)
    plain = copy.deepcopy(mine)
    for parent in list(plain.modules()):
        for child_name, child in list(parent.named_children()):
            if type(child) is DecodingLinear:
                setattr(parent, child_name, _Dequantised(child))
    x, state, expected_state = torch.randn(3, 12, 48), None, None
    for step in x.split(1, 1):
        y, state = mine(step, state)
        expected, expected_state = plain(step, expected_state)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        state = expected_state  # an input between two codes may be rounded to either, and the next steps pass it on


@of_each
@of_each_number
def test_it_is_close_to_the_layer(name, numbers):
    mixer = MAKERS[name]().eval()
    x = torch.randn(3, 12, 48)
    found, expected = packed(mixer, numbers)(x)[0], mixer(x)[0]
    error = (found - expected).norm() / expected.norm()
    assert 1e-5 < error < {"bfloat16": 0.02, "int8": 0.05, "int4": 0.25}[numbers]
    assert torch.equal(packed(mixer, "float32")(x[:, :1])[0], mixer(x[:, :1])[0]) or name == "slstm"


@of_each
@of_each_number
def test_cuts_do_not_change_a_bit(name, numbers):
    mixer, x = packed(MAKERS[name](), numbers), torch.randn(4, 21, 48)
    y, last = mixer(x)
    pieces, state = [], None
    for piece in x.split([1, 4, 15, 1], 1):
        part, state = mixer(piece, state)
        pieces.append(part)
    torch.testing.assert_close(torch.cat(pieces, 1), y, rtol=0, atol=1e-6)
    for mine, expected in zip(tensors(state), tensors(last)):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("numbers", "bits"), [("bfloat16", 16), ("int8", 8), ("int4", 4.5)])
def test_recurrent_weights_are_as_small_as_those_of_linear_layers(numbers, bits):
    size = 128
    slstm = packed(SLSTM(4 * size), numbers)
    assert sum(head.stored.nbytes for head in slstm.heads) == 4 * 4 * size * size * bits / 8
    mine = packed(RNN(GRUCell(size, size)), numbers).cell
    layers = [part for part in mine.modules() if isinstance(part, DecodingLinear)]
    assert sum(layer.stored.nbytes for layer in layers) == 6 * size * size * bits / 8
    assert not list(mine.parameters())


@of_each_number
def test_an_orthogonal_matrix_stays_nearly_orthogonal(numbers):
    """Rounded to int4, its singular values would be between 0.7 and 1.4."""
    mine = packed(RNN(NCGRUCell(128, 128)), numbers).cell
    values = torch.linalg.svdvals(mine.candidate_weight.double())
    assert (values - 1).abs().max() < 0.01
    assert (values - 1).abs().max() > 1e-4


@of_each_number
def test_models_decode_with_them(numbers):
    language_model = LanguageModel(LanguageModelConfig(31, None, 2, 32, 41, mixer="slstm"))
    transformer = CRT(CRTConfig(**SIZES))
    for model in (language_model.eval(), transformer.eval()):
        prepared, tokens = prepare(model, numbers), torch.randint(31, (2, 9))
        found, _ = prepared(tokens)
        state, steps = None, []
        for token in tokens.split(1, 1):
            logits, state = prepared(token, state)
            steps.append(logits)
        assert (torch.cat(steps, 1) - found).norm() <= 0.1 * found.norm()
        expected, _ = model(tokens)
        assert (found - expected).norm() <= 0.5 * expected.norm()
