import pytest
import torch
from torch import nn

from recurra.analysis.gates import GateRecord, record_gates, reset_contrast
from recurra.models.language_model import LanguageModel, LanguageModelConfig

VOCABULARY, WIDTH = 6, 8


def make_model(*mixers: str, **options) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(VOCABULARY, None, len(mixers), WIDTH, 8, mixer=list(mixers), **options))


@pytest.fixture
def tokens():
    return torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))


def test_records_what_each_layer_with_gates_applied(tokens):
    model, inputs = make_model("gateloop", "gru", "gateloop").eval(), {}
    for layer, block in enumerate(model.blocks):
        block.mixer.register_forward_hook(lambda _, given, __, layer=layer: inputs.update({layer: given[0]}))
    model(tokens)
    record = record_gates(model.train(), tokens)
    assert record.layers == (0, 2)
    for layer, magnitude, phase in zip(record.layers, record.magnitudes, record.phases):
        wanted = model.blocks[layer].mixer.transition(inputs[layer])
        assert magnitude.shape[:2] == (2, 7)
        torch.testing.assert_close(magnitude, wanted[0].detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(phase, wanted[1].detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(record.tokens, tokens)


def test_the_model_is_afterwards_as_before(tokens):
    model = make_model("gateloop", "gateloop", dropout=0.5).train()
    model.blocks[1].mixer.eval()
    modes = [module.training for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    record_gates(model, tokens)
    assert [module.training for module in model.modules()] == modes
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_a_model_without_gates_is_refused(tokens):
    with pytest.raises(ValueError, match=r"model is one with the mixers .*; expected a mixer with a method transition"):
        record_gates(make_model("gru", "gru"), tokens)
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
