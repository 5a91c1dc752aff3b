"""How rows of different lengths are run, and what the models make of tokens and targets that do not count."""

from typing import NamedTuple

import jaxtyping
import pytest
import torch
from tests.tracing import compile_by_tracing
from torch import nn

import recurra
from recurra import state as states
from recurra.layers.embeddings import counted_tokens
from recurra.lengths import run_lengths
from recurra.mixers.base import Mixer, StateSpec
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig

MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]).bool()


def language_model(**options):
    sizes = {"vocab_size": 9, "n_layer": 2, "d_model": 8, "d_channel_mixing": 8}
    return LanguageModel(LanguageModelConfig(**{**sizes, **options})).double()


class SumState(NamedTuple):
    total: torch.Tensor


class Counter(nn.Module):
    """y is how many steps a stream had; it remembers the shapes of its calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, x, state=None):
        self.calls.append(tuple(x.shape[:2]))
        start = torch.zeros(x.shape[0]) if state is None else state
        return start[:, None] + torch.arange(1.0, x.shape[1] + 1), start + x.shape[1]


def test_rows_go_together_as_far_as_the_shortest_reaches():
    counter = Counter()
    y, state = run_lengths(counter, torch.zeros(4, 5), None, mask=MASK)
    assert counter.calls == [(4, 0), (3, 1), (2, 2)]
    assert y.tolist() == [[1, 2, 3, 0, 0], [0, 1, 0, 2, 3], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]
    assert state.tolist() == [3, 3, 1, 0]


def test_rows_at_one_place_go_together():
    mixer = recurra.create_mixer("gateloop-attention", 8, window=4)
    _, state = mixer(torch.randn(4, 5, 8), mask=MASK)
    assert [len(rows.keys[0]) for rows in state.states] == [3, 3, 1, 0]
    sizes = []
    mixer.qkv.register_forward_hook(lambda module, inputs, output: sizes.append(tuple(inputs[0].shape[:2])))
    _, state = mixer(torch.randn(4, 2, 8), state)
    assert sizes == [(2, 2), (1, 2), (1, 2)]
    _, state = mixer(torch.randn(4, 1, 8), state)
    assert not isinstance(state, states.Ragged)  # the windows are full: all rows stand at one place


@pytest.mark.parametrize("tie", [True, False])
def test_the_loss_of_what_does_not_count_is_zero(tie):
    xl = TransformerXLConfig(
        vocab_size=9, segment_length=3, n_layer=1, d_model=8, n_heads=2, d_channel_mixing=8, dropout=0.0,
        tie_embeddings=tie,
    )  # fmt: skip
    for model in (language_model(tie_embeddings=tie), TransformerXL(xl).double()):
        tokens, targets = torch.randint(9, (4, 5)), torch.randint(9, (4, 5))
        losses, state = model.loss(tokens, targets, mask=MASK)
        assert losses.shape == MASK.shape
        assert torch.equal(losses > 0, MASK)
        alone, _ = model.loss(tokens[1:2, MASK[1]], targets[1:2, MASK[1]])
        torch.testing.assert_close(losses[1, MASK[1]], alone[0], rtol=1e-12, atol=1e-12)
        packed, last = model.loss(tokens[MASK][None], targets[MASK][None], cu_seqlens=torch.tensor([0, 3, 6, 7, 7]))
        torch.testing.assert_close(packed[0], losses[MASK], rtol=1e-12, atol=1e-12)
        for one, other in zip(states.split(state), states.split(last), strict=True):
            assert states.layout(one) == states.layout(other)


def test_padding_is_a_token_or_ignored():
    tokens = torch.randint(9, (4, 5))
    assert torch.equal(counted_tokens(tokens, None, 9), tokens)
    ignored = torch.where(MASK, tokens, -100)
    assert torch.equal(counted_tokens(ignored, MASK, 9), torch.where(MASK, tokens, 0))
    for place in ((0, 4), (0, 0)):
        bad = tokens.clone()
        bad[place] = 9
        with pytest.raises(IndexError, match="the id 9"):
            counted_tokens(bad, MASK, 9)
    ignored[0, 0] = -100
    with pytest.raises(IndexError, match="the id -100"):
        counted_tokens(ignored, MASK, 9)


def test_a_mixer_without_masks_is_not_fed_padding():
    seen = []

    class Sum(Mixer):
        def __init__(self, d_model):
            super().__init__(d_model, SumState, total=StateSpec((d_model,)))

        def mix(self, x, state, mask):
            assert mask is None
            seen.append(x)
            y = state.total[:, None] + x.cumsum(1)
            return y, SumState(y[:, -1].clone())

    x = torch.randn(4, 5, 3, dtype=torch.float64).masked_fill(~MASK[..., None], torch.nan)
    assert Sum(3).initial_state(4).total.shape == (4, 3)  # no weight says of which type and where
    padded, state = Sum(3)(x, mask=MASK)
    packed, last = Sum(3)(x[MASK][None], cu_seqlens=torch.tensor([0, 3, 6, 7, 7]))
    assert not any(steps.isnan().any() for steps in seen)
    assert sum(steps.shape[0] * steps.shape[1] for steps in seen) == 2 * MASK.sum()
    torch.testing.assert_close(padded[MASK], packed[0], rtol=1e-12, atol=1e-12)
    assert padded[~MASK].eq(0).all()
    for row, steps in enumerate(MASK):
        expected = x[row, steps].sum(0)
        torch.testing.assert_close(state.total[row], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(last.total[row], expected, rtol=1e-12, atol=1e-12)


def test_relative_attention_takes_no_encoding_beside_a_mask():
    mixer = recurra.create_mixer("relative-attention", 8)
    x = torch.randn(4, 5, 8)
    encoding = mixer.encode(x, mixer.initial_state(4))
    with pytest.raises(ValueError, match="encoding is given for sequences of different lengths; expected"):
        mixer(x, encoding=encoding, mask=MASK)
    with pytest.raises(ValueError, match="encoding is given for sequences of different lengths; expected"):
        mixer(x[:1], encoding=encoding, cu_seqlens=torch.tensor([0, 2, 5]))


def test_a_mask_of_another_kind(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(TypeError, match=r"mask is a list; expected a torch\.Tensor"):
        recurra.create_mixer("gateloop", 8)(torch.randn(1, 2, 8), mask=[[True, True]])
    with pytest.raises(TypeError, match=r"mask is int64 \(1, 2\) on cpu; expected booleans.*mask\.bool\(\)"):
        recurra.create_mixer("gateloop", 8)(torch.randn(1, 2, 8), mask=torch.ones(1, 2, dtype=torch.int64))


@pytest.mark.compile
@pytest.mark.parametrize(
    "mixer",
    ["gateloop", *(pytest.param(name, marks=pytest.mark.slow) for name in ("linear-attention", "retnet", "lru", "s5"))],
)
def test_masks_of_recurrences_compile(mixer):
    options = {"n_heads": 2} if mixer == "retnet" else {}
    model = language_model(mixer=mixer, mixer_options=options, n_layer=1)
    compiled = compile_by_tracing(model)
    tokens = torch.randint(9, (4, 5))
    torch.testing.assert_close(compiled(tokens, mask=MASK)[0], model(tokens, mask=MASK)[0])


@pytest.mark.parametrize("packed", [False, True])
def test_a_sequence_without_steps_does_not_decide_the_type(packed):
    """Under autocast what has no step comes back in its own type, beside results in bfloat16."""
    mixer, x = recurra.create_mixer("gru", 8), torch.randn(2, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        if packed:
            borders = [torch.tensor(b) for b in ([0, 2, 3], [0, 0, 3])]
            found = [mixer(x[:1], cu_seqlens=cu_seqlens)[0] for cu_seqlens in borders]
        else:
            masks = [torch.tensor([[1, 1, 1], last]).bool() for last in ([1, 0, 0], [0, 0, 0])]
            found = [mixer(x, mask=mask)[0] for mask in masks]
    assert found[0].dtype == found[1].dtype


def test_a_state_of_streams_at_different_places_is_their_modules_own():
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]).bool()
    sizes = {"vocab_size": 9, "n_layer": 1, "d_model": 8, "n_heads": 2, "segment_length": 4, "mem_len": 6}
    xl = TransformerXL(TransformerXLConfig(**sizes)).double()
    mixer = recurra.create_mixer("rotary-attention", 8, window=9, n_heads=2).double()
    for module, x in ((xl, torch.randint(9, (2, 5))), (mixer, torch.randn(2, 5, 8).double())):
        _, state = module(x, mask=mask)
        assert isinstance(state, states.Ragged)
        module.require_state(state, 2)
        with pytest.raises(ValueError, match="a Ragged of 2 streams; expected one of 3"):
            module.require_state(state, 3)
        with pytest.raises((TypeError, ValueError)):
            module.require_state(states.Ragged((state.states[0], None)), 2)
