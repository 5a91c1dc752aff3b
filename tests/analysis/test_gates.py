import pytest
import torch
from torch import nn

from recurra.analysis.gates import GateRecord, record_gates, reset_contrast
from recurra.convert.export.programs import GatedModel, gate_layers, state_tensors, zero_state
from recurra.mixers import GRUState, create_mixer, list_mixers
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.shell import mixers_with_transition, transition_of
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig

VOCABULARY, WIDTH = 6, 8
OPTIONS = {
    "mamba2": {"d_state": 4},
    "mamba2-attention": {"d_state": 4},
    "mamba3": {"d_state": 8},
    "mlstm": {"n_heads": 2},
    "zamba2": {"d_state": 4},
}
WITHOUT_GATES = {
    *("gated-attention", "mla", "relative-attention", "rotary-attention", "reformer"),  # the steps themselves
    *("linear-attention", "performer"),  # sums that keep everything
    *("hyena", "rwkv4-channel-mixing", "rwkv7-channel-mixing", "short-conv"),  # a window
}


def make_model(*mixers: str, **options) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(VOCABULARY, None, len(mixers), WIDTH, 8, mixer=list(mixers), **options))


@pytest.fixture
def tokens():
    return torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))


def test_records_what_each_layer_with_gates_applied(tokens):
    model, inputs = make_model("gateloop", "hyena", "gateloop").eval(), {}
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
    expected = "expected a mixer with a method transition"
    with pytest.raises(ValueError, match=f"model is a LanguageModel with the mixers Hyena, Performer; {expected}"):
        record_gates(make_model("hyena", "performer"), tokens)
    config = TransformerXLConfig(vocab_size=VOCABULARY, segment_length=4, n_layer=1, d_model=WIDTH, n_heads=2)
    for model in (TransformerXL(config), nn.Embedding(VOCABULARY, WIDTH)):
        assert mixers_with_transition(model) == {}
        with pytest.raises(ValueError, match=f"with no mixers in blocks; {expected}"):
            record_gates(model, tokens)


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


@pytest.mark.parametrize("mixer", list_mixers())
def test_every_mixer_shows_its_gates_or_has_none(mixer):
    """The gates of a stream are the same as a whole, from its middle on, and token by token as they are exported."""
    model = make_model(mixer, mixer_options={mixer: OPTIONS.get(mixer, {})}).eval()
    assert bool(mixers_with_transition(model)) == (mixer not in WITHOUT_GATES)
    if mixer in WITHOUT_GATES:
        return
    tokens = torch.randint(VOCABULARY, (1, 7))
    record = record_gates(model, tokens)
    (magnitude,), (phase,) = record.magnitudes, record.phases
    assert 0 <= magnitude.min() <= magnitude.max() <= 1
    with torch.no_grad():
        _, state = model(tokens[:, :3])
    later = record_gates(model, tokens[:, 3:], state)
    torch.testing.assert_close(later.magnitudes[0], magnitude[:, 3:])
    torch.testing.assert_close(later.phases[0], phase[:, 3:])
    if model.why_not_exportable():
        return
    n = magnitude.shape[-1]
    shown = torch.linspace(0, n - 1, min(n, 64), dtype=torch.float64).round().long()
    assert [tuple(layer) for layer in gate_layers(model)] == [(0, len(shown))]
    step, flat = GatedModel(model), zero_state(state_tensors(model), 1)
    for number, token in enumerate(tokens.split(1, 1)):
        with torch.no_grad():
            _, now, turned, *flat = step(token, *flat)
        torch.testing.assert_close(now, magnitude[:, number, shown])
        torch.testing.assert_close(turned, phase[:, number, shown])


def memory(state, field: str) -> torch.Tensor:
    """What decays, without the stabiliser."""
    values = getattr(state, field)
    if "m" not in state._fields:
        return values
    return values * torch.exp(state.m).reshape(*state.m.shape, *(1,) * (values.dim() - state.m.dim()))


@pytest.mark.parametrize(
    "name",
    [
        *("gla", "gateloop", "hgrn2", "lightning-attention", "linear-rnn", "lru", "mamba2", "min-gru", "min-lstm"),
        *("mlstm", "rg-lru", "rwkv4", "s4d", "s5", "slstm"),
    ],
)
def test_a_gate_is_the_share_of_the_memory_that_a_step_keeps(name):
    torch.manual_seed(0)
    options = {"n_heads": 2} if name in ("gla", "lightning-attention") else OPTIONS.get(name, {})
    mixer, x = create_mixer(name, WIDTH, **options).double(), torch.randn(2, 4, WIDTH).double()
    with torch.no_grad():
        _, state = mixer(x[:, :3])
        field = next(field for field in ("c", "a", "h") if field in state._fields)
        changed = state._replace(**{field: 2 * getattr(state, field)})
        kept = memory(mixer(x[:, 3:], changed)[1], field) - memory(mixer(x[:, 3:], state)[1], field)
        magnitude, phase = (part[:, 0] for part in transition_of(mixer, x[:, 3:], state))
    before = memory(state, field).reshape(*magnitude.shape, -1)  # gates are those of the first dimensions
    gates = torch.polar(magnitude.double(), phase.double())[..., None]
    found = kept.reshape(before.shape)
    torch.testing.assert_close(found, (gates * before).to(found.dtype), rtol=1e-6, atol=1e-9)
    assert found.is_complex() or not phase.any()


def test_a_gru_keeps_what_its_gate_shows():
    torch.manual_seed(0)
    mixer, x = create_mixer("gru", WIDTH), torch.randn(2, 4, WIDTH)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter[-WIDTH:] = 0  # the candidate: what is left of h_t is what was kept
        h = 1 + mixer.initial_state(2).h
        y, _ = mixer(x, GRUState(h))
        magnitude, _ = transition_of(mixer, x, GRUState(h))
    torch.testing.assert_close(y, magnitude * torch.cat([h[:, None], y[:, :-1]], 1))


@pytest.mark.parametrize("name", ["delta-net", "gated-delta-net"])
def test_the_gates_of_the_delta_rule_are_the_eigenvalues_of_its_transition(name):
    torch.manual_seed(0)
    options = {"d_qk": WIDTH, "d_v": WIDTH, "n_heads": 2, "negative_eigenvalues": True}
    mixer, x = create_mixer(name, WIDTH, **options).double(), 9 * torch.randn(4, 1, WIDTH).double()
    start = mixer.initial_state(4)
    with torch.no_grad():
        unit = start._replace(h=torch.eye(WIDTH // 2, dtype=x.dtype).expand(start.h.shape).clone())
        eigenvalues = torch.linalg.eigvalsh(mixer(x, unit)[1].h - mixer(x, start)[1].h)
        magnitude, phase = mixer.transition(x)
        found = (magnitude * torch.cos(phase))[:, 0]
    along = found[:, -2:]
    torch.testing.assert_close(eigenvalues.amin(-1), along, rtol=1e-3, atol=1e-4)  # keys are not quite of length 1
    torch.testing.assert_close(eigenvalues.amax(-1), found[:, :2] if len(found[0]) > 2 else torch.ones_like(along))
    assert along.min() < 0


def test_kda_decays_every_channel_as_its_gates_show():
    torch.manual_seed(0)
    mixer, x = create_mixer("kda", WIDTH, n_heads=2), torch.rand(3, 1, WIDTH)
    start = mixer.initial_state(3)
    with torch.no_grad():
        mixer.rate_projection.weight.fill_(-100.0)  # nothing is learned
        last = mixer(x, start._replace(h=torch.ones_like(start.h)))[1].h
        magnitude, phase = mixer.transition(x)
    torch.testing.assert_close(last, magnitude.view(3, 2, -1, 1).expand_as(last))
    assert magnitude.std() > 0
    assert not phase.any()


def test_retention_decays_and_turns_as_its_gates_show():
    mixer = create_mixer("retnet", WIDTH, n_heads=2)
    start = mixer.initial_state(1)
    with torch.no_grad():
        state = start._replace(h=torch.randn_like(start.h))
        x = torch.zeros(1, 1, WIDTH)
        pairs = (one.h.mT.unflatten(-1, (-1, 2)).contiguous() for one in (state, mixer(x, state)[1]))
        before, after = map(torch.view_as_complex, pairs)
        magnitude, phase = transition_of(mixer, x)
    a = torch.polar(magnitude, -phase)[0, 0].view(2, 1, -1)
    torch.testing.assert_close(after, a * before)
