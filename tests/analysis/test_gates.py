import pytest
import torch
from torch import nn

from recurra.analysis.gates import GateRecord, record_gates, reset_contrast
from recurra.models.language_model import LanguageModel, LanguageModelConfig

VOCABULARY, WIDTH, CHANNELS = 6, 8, 5


class GatedMixer(nn.Module):
    """The least that `record_gates` needs: y is x, and the transition is a function of x."""

    def __init__(self, channels: int = CHANNELS) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * channels)
        self.drop = nn.Dropout(0.5)

    def transition(self, x):
        magnitude, phase = self.gate(x).chunk(2, dim=-1)
        return torch.sigmoid(magnitude), phase

    def forward(self, x, state):
        assert self.training or not torch.is_grad_enabled()
        return self.drop(x), state


class PlainMixer(nn.Module):
    def forward(self, x, state):
        return x, state


class Block(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm_mixing = nn.LayerNorm(WIDTH)
        self.mixer = mixer

    def forward(self, x, state):
        y, state = self.mixer(self.norm_mixing(x), state)
        return x + y, state


class Model(nn.Module):
    """Embeds, adds the state that comes in, and runs the blocks."""

    def __init__(self, *mixers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(mixer) for mixer in mixers)

    def forward(self, tokens, state=None):
        x = self.embedding(tokens)
        x = x if state is None else x + state
        for block in self.blocks:
            x, _ = block(x, None)
        return x, x[:, -1:]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model(GatedMixer(), PlainMixer(), GatedMixer(channels=3))


@pytest.fixture
def tokens():
    return torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))


def expected_inputs(model, tokens, state=None):
    """The input of each block's mixer, without dropout."""
    x = model.embedding(tokens) if state is None else model.embedding(tokens) + state
    inputs = []
    for block in model.blocks:
        inputs.append(block.norm_mixing(x))
        x = x + inputs[-1]
    return inputs


def test_records_what_each_layer_with_gates_applied(model, tokens):
    record = record_gates(model, tokens)
    inputs = expected_inputs(model, tokens)
    assert record.layers == (0, 2)
    assert [tuple(m.shape) for m in record.magnitudes] == [(2, 7, CHANNELS), (2, 7, 3)]
    for layer, magnitude, phase in zip(record.layers, record.magnitudes, record.phases):
        wanted = model.blocks[layer].mixer.transition(inputs[layer])
        torch.testing.assert_close(magnitude, wanted[0].detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(phase, wanted[1].detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(record.tokens, tokens)


def test_the_state_that_comes_in_counts(model, tokens):
    state = torch.ones(2, 1, WIDTH)
    state[..., 0] = 5.0
    record = record_gates(model, tokens, state)
    wanted, _ = model.blocks[2].mixer.transition(expected_inputs(model, tokens, state)[2])
    torch.testing.assert_close(record.magnitudes[1], wanted.detach(), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(record.magnitudes[1], record_gates(model, tokens).magnitudes[1], atol=1e-3)


def test_the_model_is_afterwards_as_before(model, tokens):
    model.train()
    model.blocks[2].mixer.eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [set(vars(module)) for module in model.modules()]
    record_gates(model, tokens)
    assert [module.training for module in model.modules()] == modes
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_model_without_gates_is_refused(tokens):
    with pytest.raises(
        ValueError, match=r"model is one with the mixers PlainMixer; expected a mixer with a method transition\(x\)"
    ):
        record_gates(Model(PlainMixer(), PlainMixer()), tokens)


def test_a_module_without_blocks_is_refused(tokens):
    with pytest.raises(TypeError, match=r"model is an Embedding .*; expected one with blocks, each with a mixer"):
        record_gates(nn.Embedding(VOCABULARY, WIDTH), tokens)


def made_record(magnitudes, tokens):
    layers = tuple(range(len(magnitudes)))
    phases = tuple(torch.zeros_like(magnitude) for magnitude in magnitudes)
    return GateRecord(layers=layers, magnitudes=tuple(magnitudes), phases=phases, tokens=tokens)


def test_reset_contrast_by_hand():
    tokens = torch.tensor([[1, 5, 2], [5, 0, 0]])
    first = torch.tensor([[[0.9, 0.7], [0.1, 0.0], [0.8, 0.8]], [[0.3, 0.0], [0.6, 0.6], [0.4, 0.4]]])
    second = torch.full((2, 3, 4), 0.5)
    contrast = reset_contrast(made_record([first, second], tokens), reset_token=5)
    torch.testing.assert_close(contrast.at_resets, torch.tensor([0.1, 0.5], dtype=torch.float64))
    torch.testing.assert_close(contrast.elsewhere, torch.tensor([0.65, 0.5], dtype=torch.float64))
    assert (contrast.n_resets, contrast.n_elsewhere) == (2, 4)


@pytest.mark.parametrize(("tokens", "found"), [([[1, 2, 3]], "0 of 3"), ([[5, 5, 5]], "3 of 3")])
def test_reset_contrast_needs_both_kinds_of_step(tokens, found):
    record = made_record([torch.rand(1, 3, 2)], torch.tensor(tokens))
    with pytest.raises(ValueError, match=f"reset_token is 5, the input of {found} steps; expected"):
        reset_contrast(record, reset_token=5)


def test_a_piece_of_a_stream_has_the_transitions_of_the_whole():
    """Mamba's come from a convolution, which looks back into the piece before."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(VOCABULARY, None, 2, WIDTH, 8, mixer=["gateloop", "mamba"])).double()
    tokens = torch.randint(VOCABULARY, (2, 9))
    whole = record_gates(model, tokens)
    _, state = model(tokens[:, :5])
    piece = record_gates(model, tokens[:, 5:], state)
    for found, expected in zip(piece.magnitudes + piece.phases, whole.magnitudes + whole.phases):
        torch.testing.assert_close(found, expected[:, 5:])
